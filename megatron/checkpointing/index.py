"""The content of checkpoint.json, merged from the reports of all ranks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.config import Config
from tds.average import AVERAGE

from .files import FORMAT, WEIGHT
from .state import TrainState
from .survey import Report

Entry = dict[str, Any]  # an object of checkpoint.json, or of a report


def index_text(
    state: TrainState,
    config: Config,
    fingerprint: str,
    tensors: Entry,
    optimizer: Entry | None = None,
    rng_seed: int | None = None,
    average_of: list[Entry] | None = None,
) -> str:
    """Return the text of checkpoint.json. average_of: the checkpoints whose average the weights are."""
    content = {
        "format": FORMAT,
        "state": state.to_dict(),
        "rng_seed": rng_seed,
        "optimizer": optimizer or {"step": 0, "moments": [], "loss_scaler": {}},
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "tensors": tensors,
    }
    if average_of:
        content["average_of"] = average_of
    return json.dumps(content, indent=1)


class Merged(NamedTuple):
    """The reports of all ranks, merged.

    tensors: key -> full shape, split dimension and pieces. expected: key -> shape that must exist. optimizer: entry
    `optimizer` of checkpoint.json. sums: checksum of each file, by name.
    """

    tensors: Entry
    expected: dict[str, list[int]]
    optimizer: Entry
    sums: dict[str, str]


def merge(reports: Sequence[Report], optimizer: Mapping[str, Any]) -> Merged:
    """Merge the reports of all ranks. optimizer: what is known of the optimizer's entry."""
    files: list[Entry] = []
    expected: dict[str, list[int]] = {}
    steps: dict[str, int] = {}
    for report in reports:
        files += report.files
        expected |= report.expected
        steps |= report.steps
    tensors = _merge_tensors(files)
    entry = dict(optimizer)
    if steps:
        entry["steps"] = steps
    _list_moments(entry, files, tensors)
    sums = {file["file"]: file["sum"] for file in files}
    return Merged(tensors, expected, entry, sums)


def _merge_tensors(files: Sequence[Mapping[str, Any]]) -> Entry:
    """Return key -> full shape, split dimension and pieces of each tensor in the reports `files`.

    Several stages hold and write the parameters of the PipelineModule itself, and those parameters of a tied module
    that are not tied. For such a parameter, the result names the file of the stage on which it gets gradients.
    """
    tensors: Entry = {}
    pieces: dict[str, dict[int, Any]] = {}  # key -> first row -> piece
    for file in files:
        for key, place in file["tensors"].items():
            begin = place["begin"]
            name = key.split(".", 1)[1]
            tensors.setdefault(key, {"shape": place["shape"], "dim": place["dim"]})
            known = pieces.setdefault(key, {})
            if begin not in known or name in file["learns"]:
                known[begin] = {"file": file["file"], "begin": begin, "end": place["end"]}
    for key, known in pieces.items():
        tensors[key]["pieces"] = list(known.values())
    return tensors


def _list_moments(entry: Entry, files: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> None:
    """Add to the optimizer's `entry` which weights lack some of its moments.

    without_moments: names of the weights that have none, because they are frozen or never had a gradient; a frozen
    weight may still have an average, which `moments_of` lists. frozen: names of the weights that are not trained.
    moments_of: name -> moments of each weight that has some of them, as with Muon.
    """
    moments = entry["moments"]
    without = []
    some = {}
    for key in tensors:
        kind, name = key.split(".", 1)
        if kind != WEIGHT:
            continue
        own = [moment for moment in moments if f"{moment}.{name}" in tensors]
        if 0 < len(own) < len(moments):
            some[name] = own
        if moments and set(own) <= {AVERAGE}:
            without.append(name)
    frozen: set[str] = set()
    for file in files:
        frozen.update(file.get("frozen", ()))
    entry["without_moments"] = sorted(without)
    entry["frozen"] = sorted(frozen)
    if some:
        entry["moments_of"] = some

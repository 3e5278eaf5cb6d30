"""The content of checkpoint.json, merged from the reports of all ranks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.config import Config
from tds.average import AVERAGE

from .files import FORMAT, WEIGHT
from .share import Report
from .state import TrainState

JsonObject = dict[str, Any]  # an object of checkpoint.json, or of a report


def index_text(
    state: TrainState,
    config: Config,
    fingerprint: str,
    tensors: JsonObject,
    optimizer: JsonObject | None = None,
    rng_seed: int | None = None,
    average_of: list[JsonObject] | None = None,
) -> str:
    """Return the text of checkpoint.json. average_of: the checkpoints whose average the weights are."""
    content = {
        "format": FORMAT,
        "state": state.to_dict(),
        "rng_seed": rng_seed,
        "optimizer": optimizer or {"step": 0, "moments": [], "loss_scaler": {}},  # imported weights have no such state
        "tokenizer": fingerprint,
        "positions": config.positions,
        "config": config.to_dict(),
        "tensors": tensors,
    }
    if average_of:
        content["average_of"] = average_of
    return json.dumps(content, indent=1)


class MergedReports(NamedTuple):
    """The reports of all ranks, merged.

    tensors: key -> full shape, split dimension and pieces. expected: key -> shape that must exist. optimizer: entry
    `optimizer` of checkpoint.json. sums: checksum of each file, by name.
    """

    tensors: JsonObject
    expected: dict[str, list[int]]
    optimizer: JsonObject
    sums: dict[str, str]


def merge_reports(reports: Sequence[Report], optimizer: Mapping[str, Any]) -> MergedReports:
    """Merge the reports of all ranks. optimizer: what is known of the optimizer's entry."""
    files: list[JsonObject] = []
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
    _add_moment_lists(entry, files, tensors)
    sums = {file["file"]: file["sum"] for file in files}
    return MergedReports(tensors, expected, entry, sums)


def _merge_tensors(files: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Return key -> full shape, split dimension and pieces of each tensor in the reports `files`.

    Several stages hold and write the parameters of the PipelineModule itself, and those parameters of a tied module
    that are not tied. For such a parameter, the result names the file of the stage on which it gets gradients.
    """
    tensors: JsonObject = {}
    pieces: dict[str, dict[int, Any]] = {}  # key -> first row -> piece
    for file in files:
        for key, placement in file["tensors"].items():
            begin = placement["begin"]
            name = key.split(".", 1)[1]
            tensors.setdefault(key, {"shape": placement["shape"], "dim": placement["dim"]})
            known_pieces = pieces.setdefault(key, {})
            if begin not in known_pieces or name in file["learns"]:  # a stage with gradients replaces another one
                known_pieces[begin] = {"file": file["file"], "begin": begin, "end": placement["end"]}
    for key, known_pieces in pieces.items():
        tensors[key]["pieces"] = list(known_pieces.values())
    return tensors


def _add_moment_lists(entry: JsonObject, files: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> None:
    """Add to the optimizer's `entry` which weights lack some of its moments.

    without_moments: names of the weights that have none, because they are frozen or never had a gradient; a frozen
    weight may still have an average, which `moments_of` lists. frozen: names of the weights that are not trained.
    moments_of: name -> moments of each weight that has some of them, as with Muon.
    """
    moments = entry["moments"]
    without_moments = []
    partial_moments = {}
    for key in tensors:
        kind, name = key.split(".", 1)
        if kind != WEIGHT:
            continue
        stored_moments = [moment for moment in moments if f"{moment}.{name}" in tensors]
        if 0 < len(stored_moments) < len(moments):  # as with Muon
            partial_moments[name] = stored_moments
        if moments and set(stored_moments) <= {AVERAGE}:  # no moment of the optimizer is stored
            without_moments.append(name)
    frozen = set[str]()
    for file in files:
        frozen.update(file.get("frozen", ()))
    entry["without_moments"] = sorted(without_moments)
    entry["frozen"] = sorted(frozen)
    if partial_moments:
        entry["moments_of"] = partial_moments

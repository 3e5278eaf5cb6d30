"""Messages between ranks during a save, facts and reports; what checkpoint.json says of the optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.ranks.buffers import BufferCopy, fingerprint_buffers
from megatron.ranks.rank_0 import is_rank_0, num_ranks
from tds import optimizer_state as zero_state
from tds.average import AVERAGE

from .buffers import is_savable
from .checksums import SHA256, Checksum, preferred_checksum
from .files import WEIGHT
from .share import Part, Report


class RankFacts(NamedTuple):
    """Facts about a rank that all ranks need before they write: its optimizer, buffers and checksum algorithm."""

    step: int
    moments: list[str]
    buffers: Mapping[str, BufferCopy]
    checksum: str


def collect_facts(engine: Any) -> RankFacts:
    """Return the facts of this rank."""
    step = zero_state.get_step(engine)
    moments = zero_state.moment_names(engine)
    buffers = fingerprint_buffers(engine.module, is_savable)
    return RankFacts(step, moments, buffers, preferred_checksum().name)


def optimizer_entry(facts: Sequence[RankFacts], engine: Any) -> dict[str, Any]:
    """Return the entry `optimizer` of checkpoint.json, as far as it is known before the shares are written."""
    moments = set[str]()
    for each in facts:
        moments.update(each.moments)
    return {
        "step": max(each.step for each in facts),
        "moments": sorted(moments),
        "loss_scaler": zero_state.get_loss_scaler(engine),
    }


def common_checksum(facts: Sequence[RankFacts]) -> Checksum:
    """Return one algorithm for all ranks, even if a package is missing on some of them."""
    names = {each.checksum for each in facts}
    return preferred_checksum() if len(names) == 1 else SHA256


def gather_on_rank_0(report: Report) -> list[Report]:
    """Return the reports of all ranks on rank 0, which writes checkpoint.json, and an empty list on other ranks."""
    world = num_ranks()
    # On rank 0, gather_object() replaces the items of this list. On other ranks, it requires None.
    reports = [report] * world if is_rank_0() else None
    if world > 1:
        dist.gather_object(report, reports)
    return reports or []


def differing_steps(engine: Any, parts: list[Part], common_step: int) -> dict[str, int]:
    """Return name -> step count of each parameter that this rank writes and whose step count is not `common_step`.

    common_step: the optimizer's step count, the largest of all parameters.
    """
    counts = zero_state.step_counts(engine)
    steps = {}
    for part in parts:
        step = counts.get(part.parameter, common_step)
        if part.is_written_here and step != common_step:
            steps[part.name] = step
    return steps


def add_moment_lists(entry: dict[str, Any], files: Sequence[Mapping[str, Any]], tensors: Mapping[str, Any]) -> None:
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
        # As with Muon, which has momentum_buffer for some weights, and exp_avg and exp_avg_sq for the others.
        if 0 < len(stored_moments) < len(moments):
            partial_moments[name] = stored_moments
        # None of the optimizer's own moments is stored. Before the first step, `moments` is empty: nothing is missing.
        if moments and set(stored_moments) <= {AVERAGE}:
            without_moments.append(name)
    frozen = set[str]()
    for file in files:
        frozen.update(file.get("frozen", ()))
    entry["without_moments"] = sorted(without_moments)
    entry["frozen"] = sorted(frozen)
    if partial_moments:
        entry["moments_of"] = partial_moments

"""Messages between ranks during a save: facts before they write, and reports of the written files."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.ranks.buffers import BufferCopy, fingerprint_buffers
from megatron.ranks.rank_0 import is_rank_0
from tds import optimizer_state as zero_state

from .buffers import is_savable
from .checksums import SHA256, Checksum, preferred_checksum
from .share import Report


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
    world = dist.get_world_size() if dist.is_initialized() else 1
    reports = [report] * world if is_rank_0() else []  # the places that gather_object() fills on rank 0
    if world > 1:
        dist.gather_object(report, reports or None)  # which requires None on other ranks
    return reports

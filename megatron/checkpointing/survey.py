"""Messages between ranks during a save: facts before they write, and reports of the written files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron import mpu
from megatron.ranks.buffers import BufferCopy, fingerprint_buffers
from megatron.ranks.rank_0 import is_rank_0
from tds import optimizer_state as zero_state

from .buffers import SavedBuffers, is_savable
from .checksums import SHA256, Checksum, preferred_checksum
from .failures import as_user_error
from .share import Part, expected_shapes, write_share
from .slow import warn_if_slow


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


def share_file_name() -> str:
    """Return the name of this rank's file of parameters."""
    mesh = mpu.get_mesh()
    return f"pipe{mesh.pipe.rank:02d}-model{mesh.model.rank:02d}-data{mesh.data.rank:02d}.safetensors"


class Report(NamedTuple):
    """Report on a rank's share for rank 0: the written files, the expected shapes, and differing step counts."""

    files: list[dict[str, Any]]
    expected: dict[str, list[int]]
    steps: dict[str, int]


@dataclass
class Share:
    """This rank's share of a checkpoint.

    path: file of the parameters. steps: see `differing_steps`. file_reports: reports of the written files. error: error
    while writing, which `Saver.finish` raises on all ranks.
    """

    path: Path
    parts: list[Part]
    buffers: SavedBuffers
    checksum: Checksum
    steps: dict[str, int]
    file_reports: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None

    def write(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write the parameters and the buffers of this rank. values: key and value of each tensor of `parts`."""
        buffers_path = self.path.with_stem(f"{self.path.stem}-buffers")
        try:
            with warn_if_slow(self.path):
                parameters = write_share(self.path, self.parts, values, self.checksum)
                buffers = self.buffers.write(buffers_path, self.checksum)
        except Exception as error:
            self.record_error(error)
            return
        self.file_reports = [report for report in (parameters, buffers) if report]

    def record_error(self, error: Exception) -> None:
        """Keep an error of this rank until all ranks can raise it."""
        self.error = as_user_error(error)

    def report(self) -> Report:
        """Return the report for rank 0."""
        expected = expected_shapes(self.parts) | self.buffers.expected
        return Report(self.file_reports, expected, self.steps)


def gather_on_rank_0(report: Report) -> list[Report]:
    """Return the reports of all ranks on rank 0, which writes checkpoint.json, and an empty list on other ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    reports = [report] * world if is_rank_0() else []
    if world > 1:
        dist.gather_object(report, reports or None)
    return reports

"""The share of padding in the samples of a run that reads conversations, or of a T5."""

from typing import Any

import torch
import torch.distributed as dist

from .. import mpu
from ..engines.engine import Batches
from ..training.feature import Feature, Interval
from ..training.run_state import Run


class Padding(Feature):
    """Feature that counts the positions of training samples, and those that are padding, since the last log line.

    Positions are counted by their document ids, of which 0 means padding. Windows of continuous text have no ids and no
    padding. The count is on one rank of each group of ranks that read the same samples.
    """

    def start(self, run: Run) -> None:
        self._device = run.device

    def batches(self, batches: Batches | None) -> Batches | None:
        self._counts = torch.zeros(2, dtype=torch.int64)
        mesh = mpu.get_mesh()
        # Other stages and context-parallel ranks read the same samples.
        counts_here = mesh.pipe.rank == 0 and mpu.context_axis().rank == 0
        if batches is None or not counts_here:
            return batches
        return self._count_padding(batches)

    def _count_padding(self, batches: Batches) -> Batches:
        for data in batches:
            for name, ids in data.items():
                if name.endswith("document_ids"):
                    self._counts += torch.tensor([ids.numel(), (ids == 0).sum()])
            yield data

    def row(self, interval: Interval) -> dict[str, Any]:
        counts = self._counts.to(self._device)
        self._counts = torch.zeros_like(self._counts)
        dist.all_reduce(counts)
        positions, padding = counts.tolist()
        return {"padding": padding / max(positions, 1)}  # 0 if no position was counted

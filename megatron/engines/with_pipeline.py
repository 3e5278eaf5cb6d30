"""The engine of a pipeline of one or more stages, around the pipeline engine of `tds`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..timers import Timers
from .engine import Batches, StepResult, end_step, set_lr


class PipeEngine:
    """Engine with a pipeline of one or more stages.

    breakdown: True measures the time of each kind of pipeline instruction; each measurement synchronizes with the
    device.
    """

    def __init__(self, engine: Any, timers: Timers, breakdown: bool) -> None:
        self.deepspeed = engine
        self.timers = timers
        self.gas: int = engine.micro_batches
        engine.progress.breakdown = breakdown

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        ds = self.deepspeed
        ds.set_micro_batches(gas or self.gas)
        set_lr(ds, lr)
        with self.timers("train batch"):
            ds.train_batch(batches)
        ds.set_dataiterator(None)  # DeepSpeed's reference to the data iterator would keep the data workers alive
        sums = self._aux(ds.micro_batches)
        aux = {name: total / ds.num_targets for name, total in sums.items()}
        return end_step(ds, self._exact_loss(), ds.get_global_grad_norm(), aux)

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        ds = self.deepspeed
        ds.eval_batch(batches, num_micro_batches=self.gas)
        aux = {name: total.item() for name, total in self._aux(self.gas).items()}
        loss = self._exact_loss().item() * ds.num_targets
        return {"loss": loss, "targets": ds.num_targets, **aux}

    def forward(self, made: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        ds = self.deepspeed
        batch_fn = ds.batch_fn
        ds.set_batch_fn(None)
        try:
            ds.eval_batch(iter(made), num_micro_batches=len(made))
        finally:
            ds.set_batch_fn(batch_fn)

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return how many seconds this stage worked since the last call of `busy`; always 0 on accelerators."""
        progress = self.deepspeed.progress
        seconds = progress.busy
        progress.busy = 0.0
        return float(seconds)

    def watch_steps(self, seconds: float) -> None:
        """Do nothing: the pipeline engine of `tds` watches each instruction, as --pipeline-timeout says."""

    def times(self) -> dict[str, float]:
        return dict(self.deepspeed.progress.take())

    def _aux(self, gas: int) -> dict[str, Tensor]:
        """Return name -> sum of an additional loss over the last global batch, of `gas` micro-batches a replica."""
        micros = gas * self.deepspeed.dp_world_size
        return {name: mean * micros for name, mean in self.deepspeed.additional_losses.items()}

    def _exact_loss(self) -> Tensor:
        """Return the loss of the last global batch in fp64, the dtype in which the engine accumulates it."""
        losses = list(self.deepspeed.named_losses.values())
        return torch.stack(losses).sum()

"""Watchdog for runs without a pipeline: if a rank fails or stalls, all ranks end, and rank 0 reports their positions.

The watchdog reports the current micro-batch of each rank. The pipeline engine has another watchdog, which reports
pipeline instructions.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tds.diagnose import Watchdog

from ..ranks.errors import RunError


class StepWatch:
    """Watchdog of the training and evaluation steps of an engine without a pipeline.

    seconds: time limit of each micro-batch, and of the rest of the step after the last micro-batch.
    """

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.watchdog = Watchdog(seconds, self._describe, "run", device)
        self._step = 0
        self._micro = 0
        self._part = "training"

    @contextmanager
    def step(self, part: str) -> Iterator[None]:
        """Context in which the watchdog watches one step.

        part: `training` or `evaluation`.
        """
        if part == "training":
            self._step += 1
        self._part = part
        self._micro = 0
        self._mark()
        # These errors have a message for the user, so the watchdog need not report them.
        with self.watchdog.watching(ValueError, OSError, RunError):
            yield

    def micro_batch(self) -> None:
        """Tell the watchdog that this rank begins the next micro-batch of the step."""
        self._micro += 1
        self._mark()

    def _mark(self) -> None:
        """Record the present position."""
        self.watchdog.record((self._part, self._step, self._micro))

    def _describe(self, position: tuple[str, int, int]) -> str:
        """Describe a recorded position: the part of the run, the step, and the micro-batch in it."""
        part, step, micro = position
        # `micro_batch` counts from 1; the report counts micro-batches from 0, as in the pipeline engine.
        location = f"micro-batch {micro - 1}" if micro else "reading its micro-batches"
        return f"{part}, {location} of the step number {step} since the start"

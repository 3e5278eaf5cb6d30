"""Watchdog for runs without a pipeline: if a rank fails or stalls, all ranks end, and rank 0 reports where they were.

The pipeline engine has its own watchdog, which reports instructions; this one reports micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tds.diagnose import Watchdog

from ..ranks.errors import RunError


class StepWatch:
    """Watchdog of the steps of an engine.

    seconds: time limit of each micro-batch, and of the part of a step that follows its last micro-batch.
    """

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.watchdog = Watchdog(seconds, self._describe, "run", device)
        self._step, self._micro, self._part = 0, 0, "training"

    @contextmanager
    def step(self, part: str) -> Iterator[None]:
        """Watch one step. part: `training` or `evaluation`."""
        self._step += part == "training"
        self._part, self._micro = part, 0
        self._mark()
        try:
            yield
        except (ValueError, OSError, RunError):
            raise  # errors with a message for the user
        except BaseException as error:
            self.watchdog.fail(error)
            raise
        finally:
            self.watchdog.at(None)

    def micro_batch(self) -> None:
        """Note that the next micro-batch of the step begins."""
        self._micro += 1
        self._mark()

    def _mark(self) -> None:
        self.watchdog.at((self._part, self._step, self._micro))

    def _describe(self, place: tuple[str, int, int]) -> str:
        part, step, micro = place
        where = f"micro-batch {micro - 1}" if micro else "reading its micro-batches"
        return f"{part}, {where} of the step number {step} since the start"

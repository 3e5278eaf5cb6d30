"""Whether a run learns: steps that were not applied, losses that are no numbers, losses that jump."""

import math
import statistics
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpointing import TrainState
from .engine import Step

REMEMBERED = 64  # losses that a new one is compared with
LEAST = 16  # of them, before anything is called a jump
DEVIATIONS, SHARE = 8.0, 0.05


class Taken(NamedTuple):
    """An iteration: its number, counted from 1, and its samples."""

    iteration: int
    first_sample: int
    samples: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} (samples {self.first_sample} to {self.first_sample + self.samples - 1})"


class Spike(NamedTuple):
    """A loss far above those before it."""

    taken: Taken
    loss: float
    median: float


class Interval(NamedTuple):
    """What was read: finite losses, norms of applied steps, how many steps were not applied, and what stands out."""

    losses: list[float]
    norms: list[float]
    skipped: int
    spikes: list[Spike]


class Fault(NamedTuple):
    """Why a run cannot go on: at least `streak` steps up to and with `taken` were not applied, or its loss is none."""

    taken: Taken
    streak: int
    loss: float
    scale: float | None  # the loss scale, where it cannot fall any more


class Health:
    """Steps are added unread; `read` reads all of them at once, so that no iteration waits for the device.

    state: where the run begins. most: steps in a row that may be left out. scale, least_scale: fp16's loss scale and
    where it cannot fall any more, None where nothing is searched for. All ranks see the same numbers and conclude the same.
    """

    def __init__(
        self, state: TrainState, most: int, scale: float | None = None, least_scale: float | None = None
    ) -> None:
        self._most, self._scale, self._least = most, scale, least_scale
        self._good, self._streak, self._starts = replace(state), 0, least_scale is not None
        self._unread: list[tuple[Step, Taken, TrainState]] = []
        self._before: deque[float] = deque(maxlen=REMEMBERED)
        self.fault: Fault | None = None

    def add(self, step: Step, taken: Taken, state: TrainState) -> None:
        """A step was made; state: of the run after it."""
        self._unread.append((step, taken, replace(state)))

    def passed_over(self, state: TrainState) -> None:
        """An iteration was left out as asked for: what was good stays so."""
        self.read()
        if not self._streak:
            self._good = replace(state)

    def worth_saving(self, state: TrainState) -> TrainState:
        """The state that the weights belong to: that of the last applied step. What is asked after `read`.

        Where fp16 searches for its loss scale, steps that are not applied are part of it, and the state is that of now.
        """
        return state if self._least is not None else self._good

    def read(self) -> Interval:
        """What was added since this was last called. If the run cannot go on, `fault` says why from here on."""
        unread, self._unread = self._unread, []
        values = [value for step, _, _ in unread for value in (step.loss, step.grad_norm)]
        tensors = [value.double() for value in values if isinstance(value, Tensor)]
        known = iter(torch.stack(tensors).tolist() if tensors else [])
        numbers = [next(known) if isinstance(value, Tensor) else value for value in values]
        found = Interval([], [], 0, [])
        for (step, taken, state), loss, norm in zip(unread, numbers[::2], numbers[1::2], strict=True):
            applied = math.isfinite(norm) and not step.skipped
            self._judge(step, taken, loss, applied)
            if math.isfinite(loss):
                found.losses.append(loss)
            if applied:
                self._good = state
                found.norms.append(norm)
                found.spikes.extend(self._spikes(taken, loss))
            else:
                found = found._replace(skipped=found.skipped + 1)
        return found

    def _judge(self, step: Step, taken: Taken, loss: float, applied: bool) -> None:
        at_the_end = not applied and self._least is not None and self._scale == step.loss_scale == self._least
        self._scale = step.loss_scale
        if applied:
            self._starts, self._streak = False, 0
        elif not self._starts:  # at first fp16's scale is far too high, and falls with each step that is left out
            self._streak += 1
        if self.fault is None and (at_the_end or self._streak >= self._most or (applied and not math.isfinite(loss))):
            self.fault = Fault(taken, self._streak, loss, self._least if at_the_end else None)

    def _spikes(self, taken: Taken, loss: float) -> list[Spike]:
        """A loss that lies farther above the median of the last ones than their noise explains.

        Noise is measured by the median absolute deviation (Hampel 1974), which single jumps do not move.
        """
        found = []
        if len(self._before) >= LEAST:
            median = statistics.median(self._before)
            noise = 1.4826 * statistics.median(abs(each - median) for each in self._before)
            if loss - median > max(DEVIATIONS * noise, SHARE * abs(median)):
                found = [Spike(taken, loss, median)]
        self._before.append(loss)
        return found

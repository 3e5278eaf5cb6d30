"""Health of a run: skipped steps, non-finite losses, and loss spikes."""

import math
import statistics
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpointing import TrainState
from .engine import Step

REMEMBERED = 64  # maximum number of recent losses with which a new loss is compared
LEAST = 16  # minimum number of recent losses before a new loss can count as a spike
# A loss is a spike if it exceeds the median by this many deviations, and by this share of the median.
DEVIATIONS, SHARE = 8.0, 0.05


class SampleRange(NamedTuple):
    """One iteration: its number, counted from 1, and its range of samples."""

    iteration: int
    first_sample: int
    samples: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} (samples {self.first_sample} to {self.first_sample + self.samples - 1})"


class Spike(NamedTuple):
    """A loss far above the median of recent losses."""

    samples: SampleRange
    loss: float
    median: float


class Interval(NamedTuple):
    """Summary of the steps since the last call of `Health.read`.

    losses: finite losses. norms: gradient norms of the applied steps. skipped: number of skipped steps.
    """

    losses: list[float]
    norms: list[float]
    skipped: int
    spikes: list[Spike]


class Fault(NamedTuple):
    """Reason why a run cannot continue: skipped steps up to and including an iteration, or its non-finite loss.

    Skipped steps are a reason if too many occur in a row, or if fp16's loss scale is at its minimum.

    samples: the iteration.
    streak: number of skipped steps in a row, without those of fp16's initial search for a loss scale.
    """

    samples: SampleRange
    streak: int
    loss: float
    scale: float | None  # the loss scale, if it is at its minimum


class Health:
    """Monitor of losses and gradient norms that never makes an iteration wait for the device.

    `add` only stores the tensors of a step; `read` copies all stored tensors to the host at once. All ranks see the
    same numbers and draw the same conclusions.
    state: training state at the start of the run.
    most: number of skipped steps in a row that ends the run.
    scale, least_scale: fp16's loss scale and its minimum; None without a dynamic loss scale.
    """

    def __init__(
        self, state: TrainState, most: int, scale: float | None = None, least_scale: float | None = None
    ) -> None:
        self._most, self._scale, self._least = most, scale, least_scale
        self._good, self._streak, self._starts = replace(state), 0, least_scale is not None
        self._unread: list[tuple[Step, SampleRange, TrainState]] = []
        self._before: deque[float] = deque(maxlen=REMEMBERED)
        self.fault: Fault | None = None

    def add(self, step: Step, samples: SampleRange, state: TrainState) -> None:
        """Add a step.

        state: state of the run after the step.
        """
        self._unread.append((step, samples, replace(state)))

    def skip(self, state: TrainState) -> None:
        """Record an iteration that a --skip-* flag skipped.

        state: state after the iteration; it may be saved if the last optimizer step was applied.
        """
        self.read()
        if not self._streak:
            self._good = replace(state)

    def state_to_save(self, state: TrainState) -> TrainState:
        """Return the state that belongs to the weights, i.e. after the last applied step. Call `read` first.

        With a dynamic loss scale, return the current `state`: a skipped step lowers the scale, which is saved, too.
        """
        return state if self._least is not None else self._good

    def read(self) -> Interval:
        """Return a summary of the steps added since the last call, and set `fault` if the run cannot continue."""
        unread, self._unread = self._unread, []
        values = [value for step, _, _ in unread for value in (step.loss, step.grad_norm)]
        tensors = [value.double() for value in values if isinstance(value, Tensor)]
        known = iter(torch.stack(tensors).tolist() if tensors else [])
        numbers = [next(known) if isinstance(value, Tensor) else value for value in values]
        found = Interval([], [], 0, [])
        for (step, samples, state), loss, norm in zip(unread, numbers[::2], numbers[1::2], strict=True):
            applied = math.isfinite(norm) and not step.skipped
            self._update(step, samples, loss, applied)
            if math.isfinite(loss):
                found.losses.append(loss)
            if applied:
                self._good = state
                found.norms.append(norm)
                found.spikes.extend(self._spikes(samples, loss))
            else:
                found = found._replace(skipped=found.skipped + 1)
        return found

    def _update(self, step: Step, samples: SampleRange, loss: float, applied: bool) -> None:
        at_the_end = not applied and self._least is not None and self._scale == step.loss_scale == self._least
        self._scale = step.loss_scale
        if applied:
            self._starts, self._streak = False, 0
        elif not self._starts:  # do not count the skipped steps by which fp16 lowers its initial, far too high scale
            self._streak += 1
        if self.fault is None and (at_the_end or self._streak >= self._most or (applied and not math.isfinite(loss))):
            self.fault = Fault(samples, self._streak, loss, self._least if at_the_end else None)

    def _spikes(self, samples: SampleRange, loss: float) -> list[Spike]:
        """Return `loss` as a spike if it exceeds the median of recent losses by more than their noise explains.

        Noise is measured by the median absolute deviation (Hampel 1974), which single spikes do not affect.
        """
        found = []
        if len(self._before) >= LEAST:
            median = statistics.median(self._before)
            noise = 1.4826 * statistics.median(abs(each - median) for each in self._before)
            if loss - median > max(DEVIATIONS * noise, SHARE * abs(median)):
                found = [Spike(samples, loss, median)]
        self._before.append(loss)
        return found

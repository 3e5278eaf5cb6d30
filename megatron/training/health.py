"""Monitoring of a run for skipped steps, non-finite losses, loss spikes and copies of weights that differ."""

import math
import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tds.spikes import Deviation

from ..checkpointing import TrainState
from ..engines.engine import StepResult
from ..ranks.replicas import check_replicas
from .feature import Feature, due

if TYPE_CHECKING:
    from .run_state import Run

MAX_RECENT_LOSSES = 64  # a new loss is compared with the median of at most this number of recent losses
MIN_RECENT_LOSSES = 16  # spikes are reported only if there are at least this number of recent losses
# A loss is a spike if it exceeds the median of recent losses by more than SPIKE_DEVIATIONS standard deviations and by
# more than SPIKE_SHARE times the median.
SPIKE_DEVIATIONS = 8.0
SPIKE_SHARE = 0.05


class SampleRange(NamedTuple):
    """Number of an iteration, counted from 1, its first sample, and its number of samples."""

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


class HealthSummary(NamedTuple):
    """Summary of the steps since the last call of `Health.read`.

    losses: finite losses. norms: finite gradient norms. skipped: number of skipped steps.
    """

    losses: list[float]
    norms: list[float]
    skipped: int
    spikes: list[Spike]


class Fault(NamedTuple):
    """Reason why a run cannot continue: skipped steps, or a non-finite loss.

    Skipped steps are a reason if too many occur in a row, or if the loss scale of fp16 is at its minimum.

    samples: the last iteration's number and its range of samples.
    streak: number of skipped steps in a row. Steps that fp16 skips at first to find its loss scale do not count.
    first: number of the first iteration after the last step that was taken.
    loss: the loss of the last iteration.
    """

    samples: SampleRange
    streak: int
    first: int
    loss: float
    min_scale: float | None  # the loss scale if it is at its minimum, else None
    spike: Deviation | None = None  # reason of the last skipped step if --skip-step-sigma skipped it


class Health:
    """Monitor of losses and gradient norms that does not make every iteration wait for the device.

    `add` only stores the tensors of a step. `read` copies all stored tensors to the host at once. All ranks read the
    same numbers, so they make the same decisions.
    state: training state at the start of the run.
    max_skipped: the run ends after this number of skipped steps in a row.
    recent_losses: losses that a new loss is compared with; clear it if those of other data follow.
    scale, min_scale: loss scale of fp16 and its minimum; None without a dynamic loss scale.
    has_stepped: whether the optimizer has made a step before, so that the loss scale is no longer the initial one.
    """

    def __init__(
        self,
        state: TrainState,
        max_skipped: int,
        scale: float | None = None,
        min_scale: float | None = None,
        has_stepped: bool = False,
    ) -> None:
        self._max_skipped = max_skipped
        self._scale = scale
        self._min_scale = min_scale
        self._applied_state = replace(state)  # after the last step that was not skipped
        self._streak = 0
        self._lowers_first_scale = min_scale is not None and not has_stepped
        self._unread: list[tuple[StepResult, SampleRange, TrainState]] = []
        self.recent_losses: deque[float] = deque(maxlen=MAX_RECENT_LOSSES)
        self.fault: Fault | None = None

    def add(self, step: StepResult, samples: SampleRange, state: TrainState) -> None:
        """Store the result of a step.

        samples: the iteration's number and its range of samples. state: training state after the step.
        """
        self._unread.append((step, samples, replace(state)))

    def skip(self, state: TrainState) -> None:
        """Record an iteration that a --skip-* flag skipped.

        state: training state after the iteration. `state_to_save` returns it if the last optimizer step before the
        iteration was not skipped.
        """
        self.read()  # counts the skipped steps in `_streak`
        if not self._streak:  # else the state to save stays that before the skipped steps
            self._applied_state = replace(state)

    def state_to_save(self, state: TrainState) -> TrainState:
        """Return the training state to save: the state after the last step that was not skipped. Call `read` first.

        With a dynamic loss scale, return the current `state`, because a skipped step lowers the loss scale, which is
        saved, too.
        """
        return state if self._min_scale is not None else self._applied_state

    def read(self) -> HealthSummary:
        """Return a summary of the steps added since the last call, and set `fault` if the run cannot continue."""
        unread = self._unread
        self._unread = []
        losses = []
        norms = []
        skipped = 0
        spikes = []
        values: list[Tensor | float] = []  # loss, gradient norm, loss, gradient norm, ...
        for step, _, _ in unread:
            values += [step.loss, step.grad_norm]
        # Copy all tensors from the device at once, as each copy makes the host wait. The copies keep the order of
        # `values`, so each tensor is replaced by the next copy.
        tensors = [value.double() for value in values if isinstance(value, Tensor)]
        copies = iter(torch.stack(tensors).tolist() if tensors else [])  # stack() refuses an empty list
        numbers = [next(copies) if isinstance(value, Tensor) else value for value in values]
        for (step, samples, state), loss, norm in zip(unread, numbers[::2], numbers[1::2], strict=True):
            is_applied = math.isfinite(norm) and not step.skip_is_known
            self._update_fault(step, samples, loss, is_applied)
            if math.isfinite(loss):
                losses.append(loss)
            if math.isfinite(norm):
                norms.append(norm)
            if is_applied:
                self._applied_state = state
                spikes.extend(self._find_spikes(samples, loss))
            else:
                skipped += 1
        return HealthSummary(losses, norms, skipped, spikes)

    def _update_fault(self, step: StepResult, samples: SampleRange, loss: float, is_applied: bool) -> None:
        """Count skipped steps, and set `fault` after a step that ends the run."""
        # The steps by which fp16 lowers its high initial loss scale do not count.
        if is_applied:
            self._lowers_first_scale = False
            self._streak = 0
        elif step.spike or not self._lowers_first_scale:
            self._streak += 1
        scale_before = self._scale
        self._scale = step.loss_scale
        if self.fault is not None:  # the first fault is the one to report
            return
        overflowed = not is_applied and step.spike is None
        min_scale = None
        # No lower loss scale is left to try if it was at its minimum before the step, and still is.
        if overflowed and scale_before == step.loss_scale == self._min_scale:
            min_scale = self._min_scale
        diverged = is_applied and not math.isfinite(loss)  # a finite gradient, but no finite loss
        if min_scale is not None or diverged or self._streak >= self._max_skipped:
            first = self._applied_state.iteration + 1
            self.fault = Fault(samples, self._streak, first, loss, min_scale, step.spike)

    def _find_spikes(self, samples: SampleRange, loss: float) -> list[Spike]:
        """Return [spike] if `loss` exceeds the median of recent losses by much more than their noise, else [].

        The noise is estimated by the median absolute deviation (Hampel 1974), which single spikes hardly affect.
        """
        spikes = []
        recent = self.recent_losses
        if len(recent) >= MIN_RECENT_LOSSES:
            median = statistics.median(recent)
            # 1.4826 times the median absolute deviation of a normal distribution is its standard deviation.
            noise = 1.4826 * statistics.median(abs(each - median) for each in recent)
            if loss - median > max(SPIKE_DEVIATIONS * noise, SPIKE_SHARE * abs(median)):
                spikes = [Spike(samples, loss, median)]
        recent.append(loss)
        return spikes


class ReplicaChecks(Feature):
    """Part of a run that checks that all copies of a weight are equal.

    It checks every --check-replicas iterations, and after steps 1, 2, 4, 8, ... of this run: a shard without
    declaration, which counts as a copy, often differs after the first step, but small bf16 steps may not show it.
    """

    def __init__(self, run: "Run") -> None:
        self._engine = run.engine.deepspeed
        self._interval = run.config.train.check_replicas
        self._steps = 0

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        self._steps += 1
        is_power_of_two = self._steps.bit_count() == 1  # a single 1 in binary
        if is_power_of_two or due(samples.iteration, self._interval):
            check_replicas(self._engine)

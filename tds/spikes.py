"""Guard that skips an optimizer step if its loss or gradient norm is far above those of recent steps."""

import math
from collections import deque
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ._deepspeed import DeepSpeedOptimizer
from .groups import max_with_nan

Number = TypeVar("Number", Tensor, float)


class Deviation(NamedTuple):
    """A loss or gradient norm far above the mean of recent steps.

    name: "loss" or "gradient norm". mean, deviation: mean and standard deviation of the last `steps` steps.
    """

    name: str
    value: float
    mean: float
    deviation: float
    steps: int

    def __str__(self) -> str:
        return (
            f"its {self.name} {self.value:.4g} is above the mean {self.mean:.4g} of the last {self.steps} steps by "
            f"{(self.value - self.mean) / self.deviation if self.deviation else math.inf:.1f} standard deviations"
        )


class SpikeGuard:
    """Guard that skips steps whose loss or gradient norm lies more than `sigma` standard deviations above the mean.

    Mean and standard deviation are those of the last `window` steps that were not skipped. Until there are half as many
    steps, no step is skipped. In a skipped step, weights, moments and step counts stay unchanged. OLMo 2 (2025) skips
    steps in this way.

    An engine calls `begin` and then `inf_if_spike` in each step. DeepSpeed's optimizers compute the gradient norm
    inside their own `step`, so the `step` of the wrapped optimizer calls `inf_if_spike` for them, and does nothing in a
    skipped step. All ranks decide alike.

    recent: (loss, gradient norm) of these steps; fill it when a run resumes.
    spike: what was wrong with the last step; None if it was not skipped by this guard.
    norm: gradient norm of the last step, measured before the decision.
    """

    def __init__(self, engine: Any, sigma: float, window: int) -> None:
        self._engine = engine
        self._sigma = sigma
        self.recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._min_steps = max(window // 2, 2)  # a standard deviation needs 2 values
        self.norm = 0.0
        self.begin(torch.zeros(()))  # defines the attributes that belong to a step
        # DeepSpeed's optimizers compute the norm in their own `step`, so the step of the optimizer inside is guarded.
        if isinstance(engine.optimizer, DeepSpeedOptimizer):
            self._guard_step(engine.optimizer.optimizer)
        engine.spike_guard = self

    def begin(self, loss: Tensor) -> None:
        """Start a step whose loss over the global batch is `loss`, a scalar."""
        self._loss = loss
        self._is_norm_checked = False
        self.spike: Deviation | None = None

    def inf_if_spike(self, norm: Number) -> Number:
        """Return the gradient norm of the global batch, or infinity if the step must be skipped. A collective.

        The host waits for the device. A step with a NaN or Inf is not counted, as its norm makes the engine skip it.
        """
        # The maximum makes the numbers bitwise equal on all ranks, on which all decisions depend.
        loss = self._loss.detach().double()
        wide_norm = torch.as_tensor(norm, dtype=torch.float64, device=loss.device)
        numbers = torch.stack([loss, wide_norm])
        global_loss, self.norm = max_with_nan(numbers).tolist()
        self._is_norm_checked = True
        if math.isfinite(global_loss) and math.isfinite(self.norm):
            loss_spike = self._find_spike("loss", global_loss, 0)
            self.spike = loss_spike or self._find_spike("gradient norm", self.norm, 1)
            if self.spike is None:
                self.recent.append((global_loss, self.norm))
        if self.spike is None:
            return norm
        return torch.full_like(norm, math.inf) if isinstance(norm, Tensor) else math.inf

    def _find_spike(self, name: str, value: float, place: int) -> Deviation | None:
        """Return the deviation of a step's `value` from those of recent steps if it is a spike, else None.

        place: index of the value in the items of `recent`.
        """
        recent = [each[place] for each in self.recent]
        steps = len(recent)
        if steps < self._min_steps:
            return None
        mean = math.fsum(recent) / steps
        deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in recent) / (steps - 1))
        if value - mean <= self._sigma * deviation:
            return None
        return Deviation(name, value, mean, deviation, steps)

    def _guard_step(self, inner: torch.optim.Optimizer) -> None:
        """Make `inner.step()` a no-op, which runs no hooks either, in each step that must be skipped.

        DeepSpeed may step its groups separately. Then only the first call in a step looks for a spike.
        """
        step = inner.step

        @wraps(step)
        def guarded_step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not self._is_norm_checked:
                self.inf_if_spike(self._engine.optimizer._global_grad_norm)
            if self.spike is None and math.isfinite(self.norm):
                return step(*args, **kwargs)
            return None

        inner.step = MethodType(guarded_step, inner)  # type: ignore[method-assign]

"""Exponential moving average of the weights, which often evaluates better than the weights (Polyak, Juditsky 1992)."""

from typing import Any

import torch
from torch import Tensor

from .clip import weights_of
from .optimizers import torch_optimizer_of

AVERAGE = "ema"  # name of the average among a parameter's optimizer tensors


class WeightAverage:
    """Moving average of the fp32 weights: after each optimizer step, average = decay x average + (1 - decay) x weight.

    It begins with the weights before the first step. A skipped step does not change it. The average is a tensor in the
    optimizer's state, beside the moments, so ZeRO shards it and checkpoints store it. Weights that never had a gradient
    have no average, as it would equal them.

    A weight that is frozen after a resume has no optimizer state. `of_frozen` has its average from the checkpoint, on
    the CPU of one rank and None on others. As the weight is constant, its average follows from the number of steps.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self._decay = decay
        self._initial: dict[Tensor, Tensor] = {}  # weights before their first step
        # Frozen weight -> its average in the checkpoint, or the weight itself until the average is loaded; None on the
        # ranks that do not keep it.
        self.of_frozen: dict[Tensor, Tensor | None] = {}
        # Number of steps, without skipped ones, since these averages were loaded. Each moves an average towards its
        # weight, which `frozen_average` does for all steps at once. A tensor if only the device knows what was skipped.
        self._applied_steps: int | Tensor = 0
        inner = torch_optimizer_of(engine)
        # A DistributedOptimizer steps its buckets in groups: only those of the current group have a gradient.
        self._in_groups = engine.distributed is not None
        inner.register_step_pre_hook(self._before_step)
        inner.register_step_post_hook(self._after_step)
        engine.weight_average = self

    def _before_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Copy each weight before its first step, since its average begins with this value."""
        for weight in weights_of(inner):
            if weight.grad is not None and AVERAGE not in inner.state.get(weight, {}):
                self._initial[weight] = weight.detach().clone()

    @torch.no_grad()
    def _after_step(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        """Move the averages towards the new weights."""
        skipped = getattr(inner, "found_inf", None)  # a scalar on the device, 1 if the device skips the step
        for weight in weights_of(inner):
            # In groups, this call has stepped the weights with a gradient, and other calls step the others. Without
            # groups, a weight without a gradient keeps its value, and its average still moves towards this value.
            if self._in_groups and weight.grad is None:
                continue
            state = inner.state.get(weight)
            if not state:
                continue  # the weight never had a gradient, so its average would equal it
            if AVERAGE not in state:
                # `_before_step` has copied a weight with a gradient. Any other weight has not changed.
                initial = self._initial.pop(weight, None)
                state[AVERAGE] = weight.detach().clone() if initial is None else initial
            rate: Any = 1 - self._decay
            if skipped is not None:
                # 0 if the step is skipped. For fp64 weights, the factor is in fp64, because fp32 would round the rate.
                rate = rate * (1 - skipped.to(weight.device, weight.dtype))
            state[AVERAGE].lerp_(weight.detach(), rate)

    def announce_frozen(self, weight: Tensor, is_kept_here: bool) -> None:
        """Announce that a checkpoint has an average of the frozen `weight`; this rank keeps it if `is_kept_here`."""
        self.of_frozen[weight] = weight if is_kept_here else None
        self._applied_steps = 0

    def set_frozen_average(self, weight: Tensor, average: Tensor) -> None:
        """Set the average of a weight that is announced by `announce_frozen`, in the shape of the weight."""
        if self.of_frozen[weight] is not None:
            self.of_frozen[weight] = average.detach().to("cpu", copy=True)

    def end_step(self, applied: bool | Tensor) -> None:
        """Count a step for the averages of frozen weights. applied: whether it changed the weights, or a tensor []."""
        if self.of_frozen:
            self._applied_steps = self._applied_steps + applied

    def frozen_average(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return the average of a frozen weight, whose value is `value`; where it is not kept, return `value`."""
        average = self.of_frozen[weight]
        if average is None:
            return value
        # In n steps, the distance of the average from a constant weight shrinks to decay ** n of what it was.
        return value.to(average).lerp(average, self._decay ** int(self._applied_steps))

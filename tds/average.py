"""Exponential moving average of the weights, which often evaluates better than the weights (Polyak, Juditsky 1992)."""

from typing import Any

import torch
from torch import Tensor

AVERAGE = "ema"  # name of the average among a parameter's optimizer tensors


class WeightAverage:
    """Moving average of the fp32 weights: after each optimizer step, average = decay x average + (1 - decay) x weight.

    It begins with the weights before the first step. A skipped step does not change it. The average is a tensor in the
    optimizer's state, beside the moments, so ZeRO shards it and checkpoints store it. Weights that never had a gradient
    have no average, as it would equal them. Create a WeightAverage before a SpikeGuard, whose hook restores the
    gradients of a skipped step.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self._decay = decay
        self._initial: dict[Tensor, Tensor] = {}  # weights before their first step
        inner: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        # A DistributedOptimizer steps its buckets in groups: only those of the current group have a gradient.
        self._in_groups = engine.distributed is not None
        inner.register_step_pre_hook(lambda *_: self._before(inner))
        inner.register_step_post_hook(lambda *_: self._after(inner))
        engine.weight_average = self

    def _before(self, inner: torch.optim.Optimizer) -> None:
        for weight in _weights(inner):
            if weight.grad is not None and AVERAGE not in inner.state.get(weight, {}):
                self._initial[weight] = weight.detach().clone()

    @torch.no_grad()
    def _after(self, inner: torch.optim.Optimizer) -> None:
        weights = _weights(inner)
        stepped = [weight for weight in weights if weight.grad is not None]
        if not stepped:  # skipped, unless the optimizer has found an Inf on the device
            return
        skipped = getattr(inner, "found_inf", None)  # a scalar on the device, 1 if the step was skipped
        for weight in stepped if self._in_groups else weights:
            state = inner.state.get(weight)
            if not state:
                continue
            if AVERAGE not in state:
                initial = self._initial.pop(weight, None)
                state[AVERAGE] = weight.detach().clone() if initial is None else initial
            rate: Any = 1 - self._decay
            if skipped is not None:
                rate = rate * (1 - skipped.to(weight.device, weight.dtype))  # a product in fp32 would round the rate
            state[AVERAGE].lerp_(weight.detach(), rate)


def _weights(inner: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in inner.param_groups for weight in group["params"]]

"""Weights that several stages share: each stage adds the gradients of all to its copy."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GradientOf = Callable[[nn.Parameter], Tensor | None]


def reduce_tied_grads(module: Any, stage: int, gradient: GradientOf | None = None) -> None:
    """Sum the gradients of each tied weight over its stages; collective over them.

    A weight that has a gradient on one stage gets one on all; a weight that has none anywhere (frozen, or not used in
    this step) keeps none, so no optimizer decays it. gradient: where the gradient of a weight is kept if not in
    `.grad`. Raises RuntimeError where a weight is frozen on one stage and learns on another.
    """
    for key, comm in module.tied_comms.items():
        names = comm["weight_attr"]
        weights = [module._recursive_getattr(module.tied_modules[key], name) for name in names]
        grads = [gradient(w) if gradient else w.grad for w in weights]
        if not weights:
            continue
        learned = torch.tensor([g is not None for g in grads], dtype=torch.int32, device=weights[0].device)
        dist.all_reduce(learned, op=dist.ReduceOp.MAX, group=comm["group"])
        for name, weight, grad, somewhere in zip(names, weights, grads, learned.tolist(), strict=True):
            if not somewhere:
                continue
            if not weight.requires_grad:
                raise RuntimeError(
                    f"the tied weight {key}.{name} is frozen on stage {stage} but learns on another one: freeze it on all "
                    f"of its stages or on none"
                )
            if grad is None:
                grad = weight.grad = torch.zeros_like(weight)
            dist.all_reduce(grad, group=comm["group"])

"""Gradient clipping by the norm over all stages and tensor-parallel ranks, each parameter counted once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._torch import scale_all


def clip_grad_norm(module: nn.Module, grid: Any, limit: float, device: torch.device) -> float:
    """Scale the gradients of this rank's `module` to a global norm of at most `limit` (0: leave them); the norm before.

    A tied weight counts only on the first of its stages, a weight that is not split over the
    tensor-parallel ranks (no `tensor_model_parallel` on it) on the first of them. The norm is not finite if any
    gradient on any rank is not, that of a copy which does not count included.
    """
    grads = {p: p.grad for p in module.parameters() if p.grad is not None}
    copies_elsewhere = grid.get_slice_parallel_rank() > 0
    mine: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for p, grad in grads.items():
        split = getattr(p, "tensor_model_parallel", False) or getattr(p, "model_parallel", False)
        counts = not getattr(p, "ds_pipe_replicated", False) and (not copies_elsewhere or split)
        (mine if counts else copies).append(grad.norm())
    total = torch.zeros((), dtype=torch.float64, device=device)
    if mine:
        total += torch.stack(mine).double().square().sum()
    if copies:
        total += 0 * torch.stack(copies).double().square().sum()  # which is nan unless all are finite
    dist.all_reduce(total, group=grid.get_model_parallel_group())
    norm = total.sqrt()
    if limit > 0 and grads:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        scale_all(list(grads.values()), factor.to(next(iter(grads.values())).dtype))
    return norm.item()

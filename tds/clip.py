"""Gradient clipping by the norm over all stages and tensor-parallel ranks, each parameter counted once."""

from typing import Any

import torch
from torch import nn

from ._torch import scale_all


def squared_norm_here(module: nn.Module, grid: Any, device: torch.device) -> torch.Tensor:
    """This rank's part of the square of the gradients' norm over all stages and tensor-parallel ranks, a scalar in fp64.

    A tied weight counts only on the first of its stages, a weight that is not split over the
    tensor-parallel ranks (no `tensor_model_parallel` on it) on the first of them. It is not finite if any
    gradient on this rank is not, that of a copy which does not count included.
    """
    copies_elsewhere = grid.get_slice_parallel_rank() > 0
    mine: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for p in module.parameters():
        if p.grad is not None:
            split = getattr(p, "tensor_model_parallel", False) or getattr(p, "model_parallel", False)
            counts = not getattr(p, "ds_pipe_replicated", False) and (not copies_elsewhere or split)
            (mine if counts else copies).append(p.grad.norm())
    total = torch.zeros((), dtype=torch.float64, device=device)
    if mine:
        total += torch.stack(mine).double().square().sum()
    if copies:
        total += 0 * torch.stack(copies).double().square().sum()  # which is nan unless all are finite
    return total


def clip_by_norm(module: nn.Module, norm: torch.Tensor, limit: float) -> None:
    """Scale the gradients of this rank's `module`, of which and of other ranks' this is the norm, to at most `limit` (0: leave them)."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if limit > 0 and grads:
        scale_all(grads, (limit / (norm + 1e-6)).clamp(max=1.0).to(grads[0].dtype))

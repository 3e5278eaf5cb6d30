"""Dispatch of tokens to experts: sort the assignments by expert, exchange rows between ranks, and undo both.

Shapes: n tokens, k experts of a token, e experts, h hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import mpu

# Function that applies this rank's experts: (rows [m, h] sorted by expert, int64 [experts] rows of each) -> [m, h].
Apply = Callable[[Tensor, Tensor], Tensor]


class _Copy(torch.autograd.Function):
    """Rows of tokens, one for each of a token's experts, in a new order: [n, h] -> [n k, h].

    order: for each new row, the number of its assignment, from 0 to n k - 1. place: the inverse of `order`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.each = each
        return x[order // each] if each > 1 else x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        found = grad[place]
        return (found.view(-1, ctx.each, grad.shape[-1]).sum(1) if ctx.each > 1 else found), None, None, None


def _copy(x: Tensor, order: Tensor, place: Tensor, each: int = 1) -> Tensor:
    return _Copy.apply(x, order, place, each)  # type: ignore[no-untyped-call,no-any-return]


def _sorted(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order [m] that sorts `keys` [m], equal keys in their order, and its inverse."""
    order = keys.argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def through_experts(x: Tensor, experts: Tensor, count: int, apply: Apply, axis: mpu.Axis) -> Tensor:
    """Return the outputs [n, k, h] of the experts [n, k] of tokens x [n, h].

    count: number of experts, of which each rank of `axis` has an equal part in the order of ranks. apply: see `Apply`.
    All ranks of the axis must call this, also without tokens.
    """
    each = experts.shape[1]
    flat = experts.flatten()
    order, place = _sorted(flat)
    counts = torch.bincount(flat, minlength=count)
    rows = _copy(x, order, place, each)
    found = apply(rows, counts) if axis.size == 1 else _exchanged(rows, counts, apply, axis)
    return _copy(found, place, order).view(-1, each, x.shape[-1])


def _exchanged(rows: Tensor, counts: Tensor, apply: Apply, axis: mpu.Axis) -> Tensor:
    """Send rows [m, h], sorted by expert, to the ranks of their experts, apply these, and send the outputs back."""
    here = torch.empty_like(counts)
    dist.all_to_all_single(here, counts, group=axis.group)
    here = here.view(axis.size, -1)  # [ranks, this rank's experts]: rows that each rank sends to each expert
    experts = torch.arange(here.shape[1], device=here.device).repeat(axis.size)
    numbers = experts.repeat_interleave(here.flatten())  # expert of each row that arrives
    to_send = counts.view(axis.size, -1).sum(1)
    sends, receives = torch.stack([to_send, here.sum(1)]).tolist()
    order, place = _sorted(numbers)
    arrived = _copy(mpu.exchange_rows(rows, sends, receives, axis), order, place)
    if torch.is_grad_enabled() and not arrived.requires_grad:
        # If some experts are frozen, all ranks must still take part in sending gradients of outputs back.
        arrived.requires_grad_()
    outputs = apply(arrived, here.sum(0))
    return mpu.exchange_rows(_copy(outputs, place, order), receives, sends, axis)

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


class _PermuteRows(torch.autograd.Function):
    """Rows of tokens, one for each of a token's experts, in a new order: [n, h] -> [n k, h].

    order: for each new row, the number of its assignment, from 0 to n k - 1. inverse: the inverse of `order`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.repeats = repeats
        # Token t has the assignments t k to t k + k - 1, so assignment i belongs to token i // k.
        return x[order // repeats] if repeats > 1 else x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        row_grads = grad[inverse]
        if ctx.repeats > 1:  # a token was copied to k rows, so their gradients are summed
            row_grads = row_grads.view(-1, ctx.repeats, grad.shape[-1]).sum(1)
        return row_grads, None, None, None


def _permute_rows(x: Tensor, order: Tensor, inverse: Tensor, repeats: int = 1) -> Tensor:
    return _PermuteRows.apply(x, order, inverse, repeats)  # type: ignore[no-untyped-call,no-any-return]


def _sort_order(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order [m] that sorts `keys` [m], equal keys in their order, and its inverse."""
    order = keys.argsort(stable=True)
    places = torch.arange(len(order), device=order.device)
    # inverse[order[i]] = i. For keys [5, 3, 4], the order is [1, 2, 0] and the inverse [2, 0, 1].
    inverse = torch.empty_like(order).scatter_(0, order, places)
    return order, inverse


def count_numbers(numbers: Tensor, length: int) -> Tensor:
    """Return int64 [length]: how often each number below `length` is in `numbers` [m].

    torch.bincount would make the host wait for the device twice, to read the smallest and the largest number.
    """
    return numbers.new_zeros(length).scatter_add_(0, numbers, torch.ones_like(numbers))


def dispatch_to_experts(x: Tensor, experts: Tensor, num_experts: int, apply_experts: Apply, axis: mpu.Axis) -> Tensor:
    """Return the outputs [n, k, h] of the experts [n, k] of tokens x [n, h].

    num_experts: number of experts, of which each rank of `axis` has an equal part in the order of ranks.
    apply_experts: see `Apply`. All ranks of the axis must call this, also without tokens.
    """
    experts_per_token = experts.shape[1]
    row_experts = experts.flatten()
    # Experts [[1, 0], [0, 1]] of two tokens are the assignments 0 to 3, of experts [1, 0, 0, 1]. Sorted by expert, they
    # are `order` [1, 2, 0, 3]. `inverse` [2, 0, 1, 3] has the sorted row of each assignment.
    order, inverse = _sort_order(row_experts)
    counts = count_numbers(row_experts, num_experts)  # rows of each expert
    rows = _permute_rows(x, order, inverse, experts_per_token)
    if axis.size == 1:
        outputs = apply_experts(rows, counts)
    else:
        outputs = _run_across_ranks(rows, counts, apply_experts, axis)
    # Swapping `order` and `inverse` puts the rows back into the order of tokens.
    return _permute_rows(outputs, inverse, order).view(-1, experts_per_token, x.shape[-1])


def _run_across_ranks(rows: Tensor, counts: Tensor, apply_experts: Apply, axis: mpu.Axis) -> Tensor:
    """Send rows [m, h], sorted by expert, to the ranks of their experts, apply these, and send the outputs back."""
    # Each rank gets, from every rank, the numbers of rows for its own experts.
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts, group=axis.group)
    received_counts = received_counts.view(axis.size, -1)  # [ranks, this rank's experts]
    sent_counts = counts.view(axis.size, -1).sum(1)
    # Numbers of rows to and from each rank, copied to the host at once.
    sends, receives = torch.stack([sent_counts, received_counts.sum(1)]).tolist()
    rank_experts = torch.arange(received_counts.shape[1], device=received_counts.device)
    local_experts = rank_experts.repeat(axis.size)
    # The expert of each row that arrives. With 2 ranks, 2 experts and received_counts [[1, 2], [0, 1]]: 0, 1, 1, 1.
    # `output_size` saves a wait for the device.
    row_experts = local_experts.repeat_interleave(received_counts.flatten(), output_size=sum(receives))
    # The rows arrive sorted by rank, then by expert; the experts need them sorted by expert only.
    order, inverse = _sort_order(row_experts)
    arrived = _permute_rows(mpu.exchange_rows(rows, sends, receives, axis), order, inverse)
    if torch.is_grad_enabled() and not arrived.requires_grad:
        # If some experts are frozen, all ranks must still take part in sending gradients of outputs back.
        arrived.requires_grad_()
    outputs = apply_experts(arrived, received_counts.sum(0))
    return mpu.exchange_rows(_permute_rows(outputs, inverse, order), receives, sends, axis)

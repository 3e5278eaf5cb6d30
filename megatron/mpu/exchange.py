"""Exchange of rows between ranks, by which tokens reach the experts of other ranks (Lepikhin et al. 2021).

Shapes: n rows that this rank sends, m rows that it receives, h hidden.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autocast import refuse_second_derivatives
from .mesh import Axis


def _exchange(x: Tensor, sends: list[int], receives: list[int], axis: Axis) -> Tensor:
    received = x.new_empty(sum(receives), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receives, sends, group=axis.group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], axis: Axis) -> Tensor:
        ctx.backward_args = receives, sends, axis  # swapped: each gradient returns to the sender of its row
        return _exchange(x, sends, receives, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        refuse_second_derivatives()
        return _exchange(grad, *ctx.backward_args), None, None, None


def exchange_rows(x: Tensor, sends: list[int], receives: list[int], axis: Axis) -> Tensor:
    """Send rows of x [n, h] to the ranks of `axis`, and return the rows [m, h] that arrive, in the order of ranks.

    sends, receives: number of rows for and from each rank, possibly 0; x holds the rows in the order of ranks. All
    ranks of the axis must call this, also without rows; the backward pass sends the gradients back.
    """
    return _Exchange.apply(x, sends, receives, axis)  # type: ignore[no-untyped-call,no-any-return]

"""Linear functions fused with the communication of sequence parallelism (`--tp-comm-overlap`).

A fused kernel multiplies the shards of the ranks one after another, while further shards arrive or leave (Wang et al.
2023; PyTorch's "async tensor parallelism"). The kernels need symmetric memory: buffers of one GPU that the other GPUs
of a node can read. On a CPU, the same functions communicate and multiply one after the other.

Shapes: s sequence, b batch; i features in, o features out, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import gather_matmul, matmul_scatter
from .matmuls import gradient_of_weight, needs_grad
from .mesh import Axis
from .sequence import shard_length, start_all_gather

Accumulate = Callable[[Tensor, Tensor], bool] | None  # see `ParamSpec.accumulate_wgrad`


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, accumulate: Accumulate) -> Tensor:
    """All-gather x [s/t, b, i] and return x W^T + b [s, b, o/t], for weight [o/t, i] and bias [o/t]."""
    return _GatheredLinear.apply(x, weight, bias, axis, accumulate)  # type: ignore[no-untyped-call,no-any-return]


def scattered_linear(x: Tensor, weight: Tensor, axis: Axis, accumulate: Accumulate) -> Tensor:
    """Sum x W^T over the ranks and return this rank's shard [s/t, b, o], for x [s, b, i/t] and weight [o, i/t].

    Raises ValueError if the number t of ranks does not divide the length s.
    """
    shard_length(x.shape[0], axis)
    return _ScatteredLinear.apply(x, weight, axis, accumulate)  # type: ignore[no-untyped-call,no-any-return]


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, accumulate: Accumulate) -> Tensor:
        ctx.axis, ctx.accumulate, ctx.onednn = axis, accumulate, False
        ctx.save_for_backward(x, weight)
        _, y = gather_matmul(x, weight.t(), axis.name)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = (needs_grad(ctx, i) for i in range(3))
        # The all-gather starts first, so that it runs during the matmul for the gradient of x.
        whole = start_all_gather(x, ctx.axis) if of_weight else None
        x_grad = matmul_scatter(grad, weight, ctx.axis.name) if of_x else None
        flat = grad.flatten(0, -2)
        weight_grad = gradient_of_weight(ctx, flat, whole.wait().flatten(0, -2)) if whole is not None else None
        return x_grad, weight_grad, flat.sum(0) if of_bias else None, None, None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis, accumulate: Accumulate) -> Tensor:
        ctx.axis, ctx.accumulate, ctx.onednn = axis, accumulate, False
        ctx.save_for_backward(x, weight)
        return matmul_scatter(x, weight.t(), axis.name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight = (needs_grad(ctx, i) for i in range(2))
        if of_x:
            whole, x_grad = gather_matmul(grad, weight, ctx.axis.name)
        else:
            whole, x_grad = start_all_gather(grad, ctx.axis).wait(), None
        weight_grad = gradient_of_weight(ctx, whole.flatten(0, -2), x.flatten(0, -2)) if of_weight else None
        return x_grad, weight_grad, None, None

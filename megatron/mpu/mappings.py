"""Communication of activations at the boundaries of model-parallel regions, each with its backward pass.

                 forward                 backward
    copy         identity                all-reduce      Megatron's f (Shoeybi et al. 2019)
    reduce       all-reduce              identity        Megatron's g
    scatter      keep own part           all-gather
    gather       all-gather              keep own part

Shapes: ... any leading dimensions, n last dimension, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..autocast import refuse_second_derivatives
from .current import current_mesh
from .mesh import Axis

AxisFunction = Callable[[Tensor, Any], Tensor]  # (tensor, Axis or, in a compiled graph, group name) -> tensor


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x [...] over the ranks of `axis`, at least two, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Gather [..., n/t] of each of t ranks, at least two, into [..., n] on every rank."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, dim=-1)


def local_part(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of x along the last dimension: [..., n] -> [..., n/t] on t ranks."""
    if x.shape[-1] % axis.size:
        raise ValueError(f"a last dimension of {x.shape[-1]} cannot be split over {axis.size} model-parallel ranks")
    return x.chunk(axis.size, dim=-1)[axis.rank].contiguous()


def identity(x: Tensor, axis: Any) -> Tensor:
    """Return x [...] as a view, without communication."""
    return x.view_as(x)


class _CollectivePair(torch.autograd.Function):
    """Autograd function that computes `forward(x, axis)` forward and `backward(gradient, axis)` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any, forward: AxisFunction, backward: AxisFunction) -> Tensor:
        ctx.axis = axis
        ctx.backward_function = backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        refuse_second_derivatives()
        return ctx.backward_function(grad, ctx.axis), None, None, None


def apply_collective(x: Tensor, axis: Axis, forward: AxisFunction, backward: AxisFunction) -> Tensor:
    """Return `forward(x, axis)` for x [...]; the backward pass returns `backward(gradient, axis)`."""
    return _CollectivePair.apply(x, axis, forward, backward)  # type: ignore[no-untyped-call,no-any-return]


class _SummedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        refuse_second_derivatives()
        return grad, None


def sum_in_place(x: Tensor, axis: Axis) -> Tensor:
    """All-reduce x [...] in place over the ranks of `axis`, at least two; the caller must not use `x` afterwards."""
    return _SummedInPlace.apply(x.contiguous(), axis)  # type: ignore[no-untyped-call,no-any-return]


def apply_on_axis(x: Tensor, axis: Axis | None, forward: AxisFunction, backward: AxisFunction) -> Tensor:
    """Call `apply_collective` on x [...], by default over the model-parallel ranks; return x on an axis of one rank."""
    axis = axis or current_mesh().model
    if axis.size == 1:
        return x
    return apply_collective(x, axis, forward, backward)


def copy_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """Return x [..., n] unchanged; the backward pass all-reduces its gradient."""
    return apply_on_axis(x, axis, identity, all_reduce)


def reduce_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """All-reduce partial sums [..., n] -> [..., n] on every rank."""
    return apply_on_axis(x, axis, all_reduce, identity)


def scatter_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """Keep this rank's part: [..., n] -> [..., n/t]. Raises ValueError if t does not divide n."""
    return apply_on_axis(x, axis, local_part, all_gather)


def gather_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """All-gather [..., n/t] -> [..., n]; the backward pass keeps this rank's part of the gradient."""
    return apply_on_axis(x, axis, all_gather, local_part)

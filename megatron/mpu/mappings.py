"""The ways an activation enters or leaves the model-parallel ranks, each with its mirror image.

                 forward                 backward
    copy         identity                all-reduce      Megatron's f (Shoeybi et al. 2019)
    reduce       all-reduce              identity        Megatron's g
    scatter      keep own part           all-gather
    gather       all-gather              keep own part
    partial      all-gather              sum, keep own part    what follows differs from rank to rank

Shapes: ... any leading dimensions, n last dimension, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, current

Way = Callable[[Tensor, Any], Tensor]  # of an Axis, or, in a compiled graph, of the name of its group


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """[...] -> [...], the sum of `x` over the line, in a new tensor (in `x` itself where this rank is alone)."""
    if axis.size == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[..., n/t] on each rank -> [..., n] on every rank."""
    if axis.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat(parts, dim=-1)


def own_part(x: Tensor, axis: Axis) -> Tensor:
    """[..., n] -> [..., n/t], this rank's part."""
    if axis.size == 1:
        return x
    if x.shape[-1] % axis.size:
        raise ValueError(f"a last dimension of {x.shape[-1]} cannot be split over {axis.size} model-parallel ranks")
    return x.chunk(axis.size, dim=-1)[axis.rank].contiguous()


def keep(x: Tensor, axis: Any) -> Tensor:
    """[...] -> [...], `x` itself."""
    return x.view_as(x)


class _Mapped(torch.autograd.Function):
    """`there(x, axis)`, whose gradient is `back(gradient, axis)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any, there: Way, back: Way) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.back(grad, ctx.axis), None, None, None


def over_ranks(x: Tensor, axis: Axis, there: Way, back: Way) -> Tensor:
    """`there(x, axis)`, whose gradient is `back(gradient, axis)`; [...] -> [...], of the shapes that these two make."""
    return _Mapped.apply(x, axis, there, back)  # type: ignore[no-untyped-call,no-any-return]


class _SummedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def sum_in_place(x: Tensor, axis: Axis) -> Tensor:
    """`reduce_from_model_parallel_region` over several ranks in the memory of `x` [...], which nobody else needs any more."""
    return _SummedInPlace.apply(x.contiguous(), axis)  # type: ignore[no-untyped-call,no-any-return]


def _apply(x: Tensor, axis: Axis | None, there: Way, back: Way) -> Tensor:
    axis = axis or current().model
    return x if axis.size == 1 else over_ranks(x, axis, there, back)


def copy_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] -> [..., n]; gradients of all ranks are summed on the way back."""
    return _apply(x, axis, keep, all_reduce)


def reduce_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] partial sums -> [..., n] their total on every rank."""
    return _apply(x, axis, all_reduce, keep)


def scatter_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] -> [..., n/t]. Raises ValueError if t does not divide n."""
    return _apply(x, axis, own_part, all_gather)


def gather_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n/t] -> [..., n]."""
    return _apply(x, axis, all_gather, own_part)


def gather_partial_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n/t] -> [..., n], of which each rank makes something of its own: gradients of all ranks are summed on the way back."""
    return _apply(x, axis, all_gather, _own_part_of_sum)


def _own_part_of_sum(x: Tensor, axis: Axis) -> Tensor:
    return own_part(all_reduce(x, axis), axis)

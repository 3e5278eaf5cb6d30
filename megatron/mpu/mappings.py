"""The four ways an activation enters or leaves the model-parallel ranks, each with its mirror image.

                 forward                 backward
    copy         identity                all-reduce      Megatron's f (Shoeybi et al. 2019)
    reduce       all-reduce              identity        Megatron's g
    scatter      keep own part           all-gather
    gather       all-gather              keep own part

Shapes: ... any leading dimensions, n last dimension, t model-parallel ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, current


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum of `x` over the line, in a new tensor (in `x` itself where this rank is alone)."""
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


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return own_part(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_gather(grad, ctx.axis), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return own_part(grad, ctx.axis), None


def _apply_over_ranks(function: type[torch.autograd.Function], x: Tensor, axis: Axis) -> Tensor:
    return function.apply(x, axis)  # type: ignore[no-untyped-call,no-any-return]


def _apply(function: type[torch.autograd.Function], x: Tensor, axis: Axis | None) -> Tensor:
    axis = axis or current().model
    return x if axis.size == 1 else _apply_over_ranks(function, x, axis)


def copy_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] -> [..., n]; gradients of all ranks are summed on the way back."""
    return _apply(_Copy, x, axis)


def reduce_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] partial sums -> [..., n] their total on every rank."""
    return _apply(_Reduce, x, axis)


def scatter_to_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n] -> [..., n/t]. Raises ValueError if t does not divide n."""
    return _apply(_Scatter, x, axis)


def gather_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[..., n/t] -> [..., n]."""
    return _apply(_Gather, x, axis)

"""The sums over model-parallel ranks as functional collectives: torch.compile takes these into its graphs, a Work it cannot.

Only what is compiled goes this way. A compiler orders communication and computation by itself, so nothing is started early by hand, and
it decides what is kept for the backward pass: with sequence parallelism that may be the gathered sequence.
Shapes: see `mappings` and `sequence`.
"""

from typing import Any

import torch
from torch import Tensor

from .._torch import gather_in_graph, scatter_sum_in_graph, sum_in_graph
from .mesh import Axis


def is_traced(axis: Axis) -> bool:
    """Whether this code is being compiled, for several ranks."""
    return axis.size > 1 and torch.compiler.is_compiling()


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_in_graph(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return sum_in_graph(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.view_as(grad), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return gather_in_graph(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_sum_in_graph(grad, ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return scatter_sum_in_graph(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_in_graph(grad, ctx.group), None


def enter(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by columns takes: `x` [s, ...], or with sequence parallelism the whole [s, ...] of [s/t, ...]."""
    found: Tensor = (_Gathered if sequence else _Copied).apply(x, axis.name)  # type: ignore[no-untyped-call]
    return found


def leave(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by rows gives: the sum of the ranks' [s, ...], or with sequence parallelism this rank's [s/t, ...] of it."""
    found: Tensor = (_Scattered if sequence else _Summed).apply(x, axis.name)  # type: ignore[no-untyped-call]
    return found

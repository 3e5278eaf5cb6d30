"""The sums over model-parallel ranks as functional collectives: torch.compile takes these into its graphs, a Work it cannot.

Only what is compiled goes this way. A compiler orders communication and computation by itself, so nothing is started early by hand, and
it decides what is kept for the backward pass: with sequence parallelism that may be the gathered sequence.
Shapes: see `mappings` and `sequence`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import gather_in_graph, scatter_sum_in_graph, sum_in_graph
from .mesh import Axis


def is_traced(axis: Axis) -> bool:
    """Whether this code is being compiled, for several ranks."""
    return axis.size > 1 and torch.compiler.is_compiling()


Way = Callable[[Tensor, str], Tensor]


def _keep(x: Tensor, group: str) -> Tensor:
    return x.view_as(x)


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, there: Way, back: Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return ctx.back(grad, ctx.group), None, None, None


def enter(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by columns takes: `x` [s, ...], or with sequence parallelism the whole [s, ...] of [s/t, ...]."""
    there, back = (gather_in_graph, scatter_sum_in_graph) if sequence else (_keep, sum_in_graph)
    return _Traced.apply(x, axis.name, there, back)  # type: ignore[no-untyped-call,no-any-return]


def leave(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by rows gives: the sum of the ranks' [s, ...], or with sequence parallelism this rank's [s/t, ...] of it."""
    there, back = (scatter_sum_in_graph, gather_in_graph) if sequence else (sum_in_graph, _keep)
    return _Traced.apply(x, axis.name, there, back)  # type: ignore[no-untyped-call,no-any-return]

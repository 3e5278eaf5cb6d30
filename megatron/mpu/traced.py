"""The sums over model-parallel ranks as functional collectives: torch.compile takes these into its graphs, a Work it cannot.

Only what is compiled goes this way. A compiler orders communication and computation by itself, so nothing is started early by hand, and
it decides what is kept for the backward pass: with sequence parallelism that may be the gathered sequence.
Shapes: see `mappings` and `sequence`.
"""

import torch
from torch import Tensor

from .._torch import gather_in_graph, scatter_sum_in_graph, sum_in_graph
from .mappings import _Mapped, keep
from .mesh import Axis


def is_traced(axis: Axis) -> bool:
    """Whether this code is being compiled, for several ranks."""
    return axis.size > 1 and torch.compiler.is_compiling()


def enter(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by columns takes: `x` [s, ...], or with sequence parallelism the whole [s, ...] of [s/t, ...]."""
    there, back = (gather_in_graph, scatter_sum_in_graph) if sequence else (keep, sum_in_graph)
    return _Mapped.apply(x, axis.name, there, back)  # type: ignore[no-untyped-call,no-any-return]


def leave(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """What a product split by rows gives: the sum of the ranks' [s, ...], or with sequence parallelism this rank's [s/t, ...] of it."""
    there, back = (scatter_sum_in_graph, gather_in_graph) if sequence else (sum_in_graph, keep)
    return _Mapped.apply(x, axis.name, there, back)  # type: ignore[no-untyped-call,no-any-return]

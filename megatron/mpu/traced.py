"""Model-parallel communication by functional collectives: torch.compile can trace these, but not `Work` handles.

Only compiled code uses these functions. The compiler schedules communication, so this module does not start
collectives early by hand. The compiler also decides what is saved for the backward pass. With sequence parallelism it
may save the gathered sequence.
Shapes: s sequence, always the first dimension; t model-parallel ranks.
"""

import torch
from torch import Tensor

from .._torch import gather_in_graph, scatter_sum_in_graph, sum_in_graph
from .mappings import _Mapped, keep
from .mesh import Axis


def is_traced(axis: Axis) -> bool:
    """Return whether this code is being compiled and runs on several ranks."""
    return axis.size > 1 and torch.compiler.is_compiling()


def traced_gather(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """Return the input [s, ...] of a column-parallel matmul: x, all-gathered from shards [s/t, ...] if `sequence`."""
    forward, backward = (gather_in_graph, scatter_sum_in_graph) if sequence else (keep, sum_in_graph)
    return _Mapped.apply(x, axis.name, forward, backward)  # type: ignore[no-untyped-call,no-any-return]


def traced_reduce(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """All-reduce the results [s, ...] of a row-parallel matmul, or if `sequence` reduce-scatter them to [s/t, ...]."""
    forward, backward = (scatter_sum_in_graph, gather_in_graph) if sequence else (sum_in_graph, keep)
    return _Mapped.apply(x, axis.name, forward, backward)  # type: ignore[no-untyped-call,no-any-return]

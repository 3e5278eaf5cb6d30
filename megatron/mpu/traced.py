"""Model-parallel communication by functional collectives: torch.compile can trace these, but not `Work` handles.

Only compiled code uses these collectives. The compiler schedules communication, so this module does not start
collectives early by hand. The compiler also decides what is saved for the backward pass. With sequence parallelism it
may save the gathered sequence.
Shapes: s sequence, always the first dimension; t model-parallel ranks.
"""

import torch
from torch import Tensor

from .._torch import all_gather_in_graph, all_reduce_in_graph, reduce_scatter_in_graph
from . import mappings
from .current import current_mesh
from .mappings import _CollectivePair, all_gather, all_reduce, identity, local_part
from .mesh import Axis


def is_traced(axis: Axis) -> bool:
    """Return whether this code is being compiled and runs on several ranks."""
    return axis.size > 1 and torch.compiler.is_compiling()


def traced_gather(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """Return the input [s, ...] of a column-parallel matmul: x, all-gathered from shards [s/t, ...] if `sequence`."""
    # Each branch is a pair: the communication of the forward pass, and that of the backward pass.
    forward, backward = (all_gather_in_graph, reduce_scatter_in_graph) if sequence else (identity, all_reduce_in_graph)
    return _CollectivePair.apply(x, axis.name, forward, backward)  # type: ignore[no-untyped-call,no-any-return]


def traced_reduce(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """All-reduce the results [s, ...] of a row-parallel matmul, or if `sequence` reduce-scatter them to [s/t, ...]."""
    # Each branch is a pair: the communication of the forward pass, and that of the backward pass.
    forward, backward = (reduce_scatter_in_graph, all_gather_in_graph) if sequence else (all_reduce_in_graph, identity)
    return _CollectivePair.apply(x, axis.name, forward, backward)  # type: ignore[no-untyped-call,no-any-return]


def gather_partial_from_model_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """All-gather [..., n/t] -> [..., n]; the backward pass sums the ranks' gradients and keeps this rank's part.

    Use it where each rank computes something different from the gathered tensor.
    """
    axis = axis or current_mesh().model
    if is_traced(axis):
        # The gather along a new first dimension sums the gradients in its backward pass, as for a sequence.
        parts = traced_gather(x.unsqueeze(0), axis, sequence=True)  # [t, ..., n/t]
        return parts.movedim(0, -2).flatten(-2)
    if axis.size == 1:
        return x
    return mappings.apply_collective(x, axis, all_gather, _sum_and_split)


def _sum_and_split(x: Tensor, axis: Axis) -> Tensor:
    """Sum x [..., n] over the ranks and keep this rank's part, [..., n/t]."""
    return local_part(all_reduce(x, axis), axis)

"""Base class and functions of the sharded layers in layers.py.

Shapes: s sequence, b batch, h hidden, t model-parallel ranks.
"""

import torch
from torch import Tensor, nn

from . import mappings
from .current import parallel_context
from .mesh import Axis, Options


def divide(total: int, axis: Axis, what: str) -> int:
    """Return `total` / number of ranks. Raises ValueError with the name `what` if there is a remainder."""
    if total % axis.size:
        raise ValueError(f"{what} {total} cannot be split over {axis.size} model-parallel ranks")
    return total // axis.size


def refuse_strides(stride: int, keep_master_weight_for_test: bool) -> None:
    """Raise ValueError for values of Megatron-LM's arguments that the layers of this package do not support."""
    if stride != 1:
        raise ValueError(
            f"stride={stride} is not supported, because each rank holds contiguous rows of the weight; leave stride at "
            f"1, and order the rows by head (query, key and value of head 0, then query, key and value of head 1, ...)"
        )
    if keep_master_weight_for_test:
        raise ValueError(
            "keep_master_weight_for_test=True is not supported, because no rank holds the whole weight; leave it out"
        )


class Sharded(nn.Module):
    """Layer sharded over the ranks of `axis`, with the communication and kernel options `options`."""

    def __init__(self, axis: Axis | None, options: Options | None) -> None:
        super().__init__()
        context = parallel_context()
        self.axis = axis or context.mesh.model
        self.options = options or context.options


def sum_over_ranks(x: Tensor, axis: Axis, options: Options) -> Tensor:
    """Sum the ranks' partial results [s, ...] in place; with sequence parallelism reduce-scatter to [s/t, ...]."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():
        from .traced import traced_reduce

        return traced_reduce(x, axis, options.sequence_parallel)
    if options.sequence_parallel:
        from .sequence import reduce_scatter_to_sequence_parallel_region

        return reduce_scatter_to_sequence_parallel_region(x, axis)
    return mappings.sum_in_place(x, axis)

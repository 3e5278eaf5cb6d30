"""Context parallelism: each context rank holds some tokens of each sample; only attention reads all tokens.

For c context ranks a sequence is cut into 2c equal slices. Rank i holds slices i and 2c - 1 - i,
counted from 0. With causal attention early slices attend to few keys and late ones to many, so this pairing balances
the work of the ranks (Megatron-LM, Llama 3: Grattafiori et al. 2024).

                     forward                      backward
    own tokens       keep the two slices          none: token ids have no gradient
    gather context   all-gather, in order         reduce-scatter

Shapes: s tokens of the whole sequence, c context ranks.
"""

import torch
from torch import Tensor

from .mappings import apply_collective
from .mesh import Axis
from .sequence import start_all_gather, start_reduce_scatter
from .traced import is_traced, traced_gather


def context_slices(length: int, axis: Axis) -> list[tuple[int, int]]:
    """Return (begin, end) of each slice that this rank holds, in order, for a sequence of `length` tokens.

    On an axis of one rank the only slice is the whole sequence. Raises ValueError, naming the flags, unless
    2 * axis.size divides the length.
    """
    if axis.size == 1:
        return [(0, length)]
    num_slices = 2 * axis.size
    if length % num_slices:
        raise ValueError(
            f"a sequence of {length} tokens cannot be sharded over --context-parallel-size {axis.size} ranks; "
            f"make --seq-length a multiple of {num_slices}"
        )
    size = length // num_slices
    return [(index * size, (index + 1) * size) for index in (axis.rank, num_slices - 1 - axis.rank)]


def all_gather_context(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [s/c, ...] of each of c ranks into [s, ...] in token order; not differentiable."""
    return _to_token_order(start_all_gather(x, axis).wait(), axis)


def _to_token_order(gathered: Tensor, axis: Axis) -> Tensor:
    """Bring all tokens [s, ...], the two slices of each rank after each other, into the order of the sequence."""
    first, second = gathered.view(axis.size, 2, -1, *gathered.shape[1:]).unbind(1)
    # Rank i of c holds slices i and 2c - 1 - i, so the second slices come in the reverse order of the ranks.
    return torch.cat([first, second.flip(0)]).flatten(0, 1)  # [2c, s/2c, ...] -> [s, ...]


def reduce_scatter_context(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter partial sums [s, ...] into this rank's tokens [s/c, ...]: the backward of `all_gather_context`."""
    first, second = x.view(2, axis.size, -1, *x.shape[1:])
    # Rank i of c gets slices i and 2c - 1 - i.
    slices_by_rank = torch.stack([first, second.flip(0)], 1)  # [c, 2, s/2c, ...]
    return start_reduce_scatter(slices_by_rank.flatten(0, 2), axis).wait()


def gather_context(x: Tensor, axis: Axis) -> Tensor:
    """All-gather [s/c, ...] into [s, ...] on each of c ranks; the backward pass reduce-scatters the gradients."""
    if is_traced(axis):
        return _to_token_order(traced_gather(x, axis, sequence=True), axis)
    return apply_collective(x, axis, all_gather_context, reduce_scatter_context)

"""Context parallelism: each rank of a context group has, for all layers, some tokens of each sample; attention alone looks at the others'.

A sequence is cut into 2c equal stretches, of which rank i has numbers i and 2c - 1 - i: with causal attention the first stretches have
little to look at and the last ones much, and so every rank has as much work as another (Megatron-LM, Llama 3: Grattafiori et al. 2024).

                     forward                      backward
    own tokens       keep the two stretches       (of numbers that do not learn)
    gather context   all-gather, in order         reduce-scatter

Shapes: s tokens of the whole sequence, c context ranks.
"""

import torch
from torch import Tensor

from .mappings import over_ranks
from .mesh import Axis
from .sequence import start_all_gather, start_reduce_scatter


def stretches(length: int, axis: Axis) -> list[tuple[int, int]]:
    """Begin and end of each stretch of a sequence of `length` tokens that this rank has, in its order; all of it where it is alone.

    Raises ValueError, naming the knobs, for a length that cannot be cut evenly.
    """
    if axis.size == 1:
        return [(0, length)]
    if length % (2 * axis.size):
        raise ValueError(
            f"a sequence of {length} tokens cannot be shared out over --context-parallel-size {axis.size} ranks; make --seq-length "
            f"a multiple of {2 * axis.size}"
        )
    each = length // (2 * axis.size)
    return [(number * each, (number + 1) * each) for number in (axis.rank, 2 * axis.size - 1 - axis.rank)]


def own_tokens(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """[..., s, ...] -> [..., s/c, ...]: this rank's tokens along `dim`; `x` itself where it is alone. Raises ValueError as `stretches`."""
    if axis.size == 1:
        return x
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in stretches(x.shape[dim], axis)], dim)


def whole_context(x: Tensor, axis: Axis) -> Tensor:
    """[s/c, ...] on each rank -> [s, ...] on every rank, tokens in their order; no gradient goes through."""
    gathered = start_all_gather(x, axis).wait()
    first, second = gathered.view(axis.size, 2, -1, *x.shape[1:]).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def sum_to_own_context(x: Tensor, axis: Axis) -> Tensor:
    """[s, ...] partial sums -> [s/c, ...]: this rank's tokens of their total. The way back of `whole_context`."""
    first, second = x.view(2, axis.size, -1, *x.shape[1:])
    return start_reduce_scatter(torch.stack([first, second.flip(0)], 1).flatten(0, 2), axis).wait()


def gather_context(x: Tensor, axis: Axis) -> Tensor:
    """[s/c, ...] -> [s, ...] on every rank; the ranks' gradients are summed on the way back."""
    return over_ranks(x, axis, whole_context, sum_to_own_context)

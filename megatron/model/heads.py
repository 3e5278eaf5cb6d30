"""Repetition of heads that several queries share.

Shapes: s sequence, b batch, n heads and g key-value heads of a rank, d width of a head.
"""

from torch import Tensor


def repeat_heads(query: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Repeat keys or values [b, g, s, d] to [b, n, s, d], one for each of the n heads of `query`."""
    repeats = query.shape[1] // heads[0].shape[1]
    return heads if repeats == 1 else tuple(x.repeat_interleave(repeats, dim=1) for x in heads)


def sum_repeated(groups: int, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Sum gradients [b, n, s, d] of repeated heads to [b, g, s, d]. groups: g."""
    if gradients[0].shape[1] == groups:
        return gradients
    return tuple(x.view(len(x), groups, -1, *x.shape[2:]).sum(2) for x in gradients)

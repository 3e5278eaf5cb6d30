"""Splitting of a fused projection into heads, and repetition of heads that several queries share.

Shapes: s sequence, b batch, n heads and g key-value heads of a rank, d width of a head, p parts: 3 for query, key and
value.
"""

from typing import Any

import torch
from torch import Tensor


def split_heads(fused: Tensor, size: int, parts: int) -> tuple[Tensor, ...]:
    """Split `fused` [s, b, n * p * d], whose rows are all parts of head 0, then of head 1, into p tensors [b, n, s, d].

    size: d. parts: p. The results are views of `fused`.
    """
    by_head = fused.view(*fused.shape[:2], -1, parts, size)  # [s, b, n, p, d]
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile fuses the gradients itself
        found = by_head.unbind(3)
    else:
        found = _Split.apply(by_head)  # type: ignore[no-untyped-call]
    return tuple(part.permute(1, 2, 0, 3) for part in found)


class _Split(torch.autograd.Function):
    """Split [s, b, n, p, d] into p tensors [s, b, n, d].

    The backward pass writes each part's gradient straight into the gradient of the projection. torch's own operations
    would stack the gradients and then rearrange the stack, which copies each gradient twice.
    """

    @staticmethod
    def forward(ctx: Any, by_head: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = by_head.shape
        ctx.set_materialize_grads(False)
        return tuple(by_head.select(3, part) for part in range(by_head.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:  # type: ignore[override]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None
        whole = known.new_empty(ctx.shape)
        for part, grad in enumerate(grads):
            place = whole.select(3, part)
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad)
        return whole


def repeat_heads(query: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Repeat keys or values [b, g, s, d] to [b, n, s, d], one for each of the n heads of `query`."""
    each = query.shape[1] // heads[0].shape[1]
    return heads if each == 1 else tuple(x.repeat_interleave(each, dim=1) for x in heads)


def sum_repeated(groups: int, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Sum gradients [b, n, s, d] of repeated heads to [b, g, s, d]. groups: g."""
    if gradients[0].shape[1] == groups:
        return gradients
    return tuple(x.view(len(x), groups, -1, *x.shape[2:]).sum(2) for x in gradients)

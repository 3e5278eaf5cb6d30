"""Splitting of a fused projection into queries, keys and values, with an efficient backward pass.

Autograd would stack their gradients and then rearrange the stack, which copies each gradient twice. Here each
gradient is copied once, to its final place.
Shapes: s sequence, b batch, n heads of this rank, p parts (query, key, value), d width of a head.
"""

from typing import Any

import torch
from torch import Tensor


def split_heads(fused: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    """Split a projection [s, b, n * p * d], ordered head by head and part by part, into p views [b, n, s, d]."""
    if not fused.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _views(fused, heads, parts)  # a compiler does the copies in one pass
    found: tuple[Tensor, ...] = _SplitHeads.apply(fused, heads, parts)  # type: ignore[no-untyped-call]
    return found


def _views(fused: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
    s, b, width = fused.shape
    return fused.view(s, b, heads, parts, width // heads // parts).permute(3, 1, 2, 0, 4).unbind()


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Tensor, heads: int, parts: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.heads = fused.shape, heads
        ctx.set_materialize_grads(False)
        return _views(fused, heads, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        known = next((grad for grad in grads if grad is not None), None)
        if known is None:
            return None, None, None
        whole = known.new_empty(ctx.shape)
        s, b, width = ctx.shape
        places = whole.view(s, b, ctx.heads, len(grads), width // ctx.heads // len(grads))
        for part, grad in enumerate(grads):
            place = places.select(3, part).permute(1, 2, 0, 3)
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad)
        return whole, None, None

"""Attention with a learned bias on a CPU that saves neither scores nor probabilities for the backward pass.

torch's fused attention on a CPU has no gradient for the bias. torch's alternative saves the attention probabilities
[b, n, q, k] of every layer. This module instead recomputes the probabilities in the backward pass (Dao et al. 2022),
one sample or one document at a time, so that they stay in the CPU's cache.

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron._torch import softmax_backward

from .pieces import Piece, Pieces


def serves(query: Tensor, bias: Tensor) -> bool:
    """Return whether `biased_attention` needs less memory than torch's attention.

    It does on a CPU if the bias requires a gradient, because torch then keeps the attention probabilities for the
    backward pass. Accelerators have a fused kernel that computes the bias's gradient without kept probabilities.
    query: [b, n, q, d]. bias: [1, n, q, k].
    """
    return query.device.type == "cpu" and torch.is_grad_enabled() and bias.requires_grad


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sees: Tensor | Pieces | None, scale: float
) -> Tensor:
    """Compute attention: query [b, n, q, d], key, value [b, n, k, d], bias [1, n, q, k] -> [b, n, q, d].

    sees: the keys that each query may attend to, as a bool mask [1 or b, 1, q, k] or as blocks of queries and keys
    (self-attention within documents); None for all keys.
    """
    return _BiasedAttention.apply(query, key, value, bias, sees, scale)  # type: ignore[no-untyped-call,no-any-return]


def _pieces(query: Tensor, mask: Tensor | None, pieces: Pieces | None, by_row: bool) -> Sequence[Piece]:
    """Return the blocks of queries and keys to compute one after another.

    If `pieces` is None, the only block is the whole batch, or, with `by_row`, each sample of the batch is a block.
    """
    if pieces is not None:
        return pieces.found
    everything = slice(None)
    if not by_row:
        return [Piece(everything, everything, everything, mask)]
    found = []
    for i in range(len(query)):
        row = slice(i, i + 1)
        own = mask if mask is None or len(mask) == 1 else mask[row]
        found.append(Piece(row, everything, everything, own))
    return found


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sees: Tensor | Pieces | None, scale: float
    ) -> Tensor:
        mask = None
        ctx.pieces = None
        if isinstance(sees, Pieces):
            ctx.pieces = sees
        else:
            mask = sees
        ctx.scale = scale
        ctx.rest = None
        ctx.save_for_backward(query, key, value, bias, mask)
        out = torch.empty_like(query)
        for piece in _pieces(query, mask, ctx.pieces, by_row=False):
            seen = piece.visible(query.device)
            # torch's fused kernel rejects a bias that requires a gradient.
            scores = bias.detach()[:, :, piece.queries, piece.keys]
            scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
            q, k, v = piece.cut(query, key, value)
            piece.cut(out)[0].copy_(F.scaled_dot_product_attention(q, k, v, attn_mask=scores, scale=scale))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A pipeline may run the backward pass of inputs and of weights separately. The first call has then already
        # computed the gradient of the bias, and the second returns it.
        if ctx.rest is not None and not mpu.needs_grad(ctx, 0):
            return None, None, None, ctx.rest, None, None
        query, key, value, bias, mask = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key = torch.empty_like(key)
        of_value = torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        added = bias[0].to(wide)
        of_bias = torch.zeros_like(bias, dtype=wide)
        for piece in _pieces(query, mask, ctx.pieces, by_row=True):
            at = (slice(None), piece.queries, piece.keys)
            seen = piece.visible(query.device)
            (g,) = piece.cut(grad)
            q, k, v, g = (x[0].to(wide) for x in (*piece.cut(query, key, value), g))
            scores = torch.baddbmm(added[at], q, k.mT, alpha=ctx.scale)
            if seen is not None:
                scores.masked_fill_(~seen[0], -torch.inf)
            p = torch.softmax(scores, -1)
            of_scores = softmax_backward(g @ v.mT, p)
            of_bias[0][at] += of_scores
            places = piece.cut(of_query, of_key, of_value)
            found = (of_scores @ k).mul_(ctx.scale), (of_scores.mT @ q).mul_(ctx.scale), p.mT @ g
            for place, gradient in zip(places, found, strict=True):
                place.copy_(gradient)
        if mpu.needs_grad(ctx, 3):
            return of_query, of_key, of_value, of_bias.to(bias.dtype), None, None
        ctx.rest = of_bias.to(bias.dtype)
        return of_query, of_key, of_value, None, None, None

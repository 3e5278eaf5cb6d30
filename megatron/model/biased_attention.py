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
from megatron._torch import softmax_backward, version_counter

from .pieces import Piece, Pieces


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scope: Tensor | Pieces | None, scale: float
) -> Tensor:
    """Compute attention: query [b, n, q, d], key, value [b, n, k, d], bias [1, n, q, k] -> [b, n, q, d].

    scope: the keys that each query may attend to, as a bool mask [1 or b, 1, q, k] or as blocks of queries and keys
    (self-attention within documents); None for all keys.
    """
    out: Tensor = _BiasedAttention.apply(query, key, value, bias, scope, scale)  # type: ignore[no-untyped-call]
    return out


def _list_pieces(query: Tensor, mask: Tensor | None, pieces: Pieces | None, by_row: bool) -> Sequence[Piece]:
    """Return the blocks of queries and keys to compute one after another.

    If `pieces` is None, the only block is the whole batch, or, with `by_row`, each sample of the batch is a block.
    """
    if pieces is not None:
        return pieces.items
    all_tokens = slice(None)
    if not by_row:
        return [Piece(all_tokens, all_tokens, all_tokens, mask)]
    row_pieces = []
    for i in range(len(query)):
        row = slice(i, i + 1)
        row_mask = mask if mask is None or len(mask) == 1 else mask[row]  # a mask of one row is that of all rows
        row_pieces.append(Piece(row, all_tokens, all_tokens, row_mask))
    return row_pieces


class _BiasedAttention(torch.autograd.Function):
    """`biased_attention`, block by block. The backward pass computes the probabilities of each block again."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scope: Tensor | Pieces | None, scale: float
    ) -> Tensor:
        mask = None
        ctx.pieces = None
        if isinstance(scope, Pieces):
            ctx.pieces = scope
        else:
            mask = scope
        ctx.scale = scale
        ctx.kept = None  # set by the first backward pass for a second one, see backward()
        ctx.save_for_backward(query, key, value, bias, mask)
        out = torch.empty_like(query)
        for piece in _list_pieces(query, mask, ctx.pieces, by_row=False):
            # torch's fused kernel rejects a bias that requires a gradient.
            attn_mask = bias.detach()[:, :, piece.queries, piece.keys]
            visible = piece.visible(query.device)
            if visible is not None:
                attn_mask = attn_mask.masked_fill(~visible, -torch.inf)
            q, k, v = piece.cut(query, key, value)
            (piece_out,) = piece.cut(out)  # a view of `out`
            piece_out.copy_(F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A pipeline may run the backward pass of inputs and of weights separately. The first call has then already
        # computed the gradient of the bias, and the second returns it. With another `grad`, which is the gradient of
        # another loss, the second call computes it again.
        if ctx.kept and not mpu.needs_grad(ctx, 0):  # input 0 is the query
            kept_grad, kept_version, bias_grad = ctx.kept
            if grad is kept_grad and version_counter(grad) == kept_version:
                return None, None, None, bias_grad, None, None
        query, key, value, bias, mask = ctx.saved_tensors
        query_grad = torch.empty_like(query)
        key_grad = torch.empty_like(key)
        value_grad = torch.empty_like(value)
        compute_dtype = torch.promote_types(query.dtype, torch.float32)
        wide_bias = bias[0].to(compute_dtype)
        bias_grad = torch.zeros_like(bias, dtype=compute_dtype)
        for piece in _list_pieces(query, mask, ctx.pieces, by_row=True):
            # A piece has one row of the batch, so [0] drops the dimension of the batch.
            q, k, v = (x[0].to(compute_dtype) for x in piece.cut(query, key, value))
            (piece_grad,) = piece.cut(grad)
            out_grad = piece_grad[0].to(compute_dtype)

            # Compute the probabilities again, as in the forward pass.
            block = (slice(None), piece.queries, piece.keys)
            scores = torch.baddbmm(wide_bias[block], q, k.mT, alpha=ctx.scale)  # bias + scale * q k^T
            visible = piece.visible(query.device)
            if visible is not None:
                scores.masked_fill_(~visible[0], -torch.inf)
            probabilities = torch.softmax(scores, -1)

            score_grad = softmax_backward(out_grad @ v.mT, probabilities)
            bias_grad[0][block] += score_grad
            # Views of this piece's part of the gradients.
            q_grad, k_grad, v_grad = piece.cut(query_grad, key_grad, value_grad)
            q_grad.copy_((score_grad @ k).mul_(ctx.scale))
            k_grad.copy_((score_grad.mT @ q).mul_(ctx.scale))
            v_grad.copy_(probabilities.mT @ out_grad)

        bias_grad = bias_grad.to(bias.dtype)
        if mpu.needs_grad(ctx, 3):  # input 3 is the bias
            return query_grad, key_grad, value_grad, bias_grad, None, None
        ctx.kept = grad, version_counter(grad), bias_grad  # for the second call
        return query_grad, key_grad, value_grad, None, None, None

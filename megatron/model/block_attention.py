"""Attention on a CPU, block by block, that saves neither scores nor probabilities for the backward pass.

It serves attention with a learned bias, and attention in bf16 on CPUs without AMX. torch's fused attention on a CPU has
no gradient for the bias; torch's alternative saves the probabilities [b, n, q, k] of every layer. In bf16, torch's
fused attention has larger errors in the gradients of keys and values. Without AMX, it is also slower than oneDNN, which
multiplies here.

The backward pass computes the probabilities of a block again (Dao et al. 2022). Scores are in fp32, or in fp64 if the
inputs are. A block has few enough for the CPU's cache.

Shapes: q queries, k keys, b batch, n query heads and g key-value heads of this rank, d width of a head; r = n / g query
heads share their keys. A block has all heads of one row of the batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron import mpu
from megatron._torch import has_amx_tiles, onednn_matmuls, softmax_backward, version_counter

from .flash_attention import empty_like_linear
from .pieces import Piece, Pieces

MAX_SCORES = 2**22  # A block has at most so many scores (16 MB in fp32), or MIN_QUERIES queries.
MIN_QUERIES = 64
# A causal block has at most so many queries. Fewer would save more scores of later keys, but need more calls.
MAX_CAUSAL_QUERIES = 128


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scope: Tensor | Pieces | None,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Compute attention: query [b, n, q, d], key, value [b, g, k, d], bias [1, n, q, k] or None -> [b, n, q, d].

    scope: the keys that each query may attend to, as a bool mask [1 or b, 1, q, k] or as blocks of queries and keys
    (self-attention within documents); None for all keys or, if `causal`, those up to the query's position (q = k).
    """
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, bias, scope, scale, causal
    )
    return out


def _row_pieces(query: Tensor, key: Tensor, scope: Tensor | Pieces | None, causal: bool) -> Sequence[Piece]:
    """Return the pieces of attention, each of one row of the batch."""
    if isinstance(scope, Pieces):
        return scope.items
    queries = slice(0, query.shape[2])
    keys = slice(0, key.shape[2])
    if scope is not None:  # a mask, which may have one entry for all rows of the batch or for all queries
        scope = scope.expand(len(query), -1, query.shape[2], -1)
    pieces = []
    for i in range(len(query)):
        row = slice(i, i + 1)
        row_mask = None if scope is None else scope[row]
        pieces.append(Piece(row, queries, keys, row_mask, causal))
    return pieces


def _blocks(piece: Piece, heads: int) -> Iterator[Piece]:
    """Cut a piece along its queries; a causal block has only the keys that its queries see.

    For example, a causal piece of 256 queries and keys becomes blocks of 128 x 128 and 128 x 256 scores.
    """
    first = piece.queries.start
    keys = piece.keys
    length = max(MAX_SCORES // (heads * (keys.stop - keys.start)), MIN_QUERIES)  # queries of a block
    if piece.causal:
        length = min(length, MAX_CAUSAL_QUERIES)
    for begin in range(first, piece.queries.stop, length):
        end = min(begin + length, piece.queries.stop)
        if piece.causal:  # the last query is number end - first of the piece, and sees as many keys
            keys = slice(keys.start, keys.start + end - first)
        mask = None if piece.mask is None else piece.mask[:, :, begin - first : end - first]
        yield Piece(piece.row, slice(begin, end), keys, mask, piece.causal)


class _BlockAttention(torch.autograd.Function):
    """`block_attention`, block by block. The backward pass computes the probabilities of each block again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        scope: Tensor | Pieces | None,
        scale: float,
        causal: bool,
    ) -> Tensor:
        ctx.pieces = _row_pieces(query, key, scope, causal)
        ctx.scale = scale
        # oneDNN compiles a kernel for each size, so it pays only for sizes that come again, not for documents.
        sizes_recur = not isinstance(scope, Pieces)
        ctx.in_onednn = query.dtype == torch.bfloat16 and sizes_recur and not torch.compiler.is_compiling()
        ctx.kept = None  # set by the first backward pass for a second one, see backward()
        ctx.save_for_backward(query, key, value, bias)
        out = empty_like_linear(query)
        if not ctx.in_onednn or has_amx_tiles():  # with AMX, torch's forward pass is several times as fast
            for piece in ctx.pieces:
                mask = piece.visible(query.device)
                if bias is not None:  # the kernel rejects one that requires a gradient
                    piece_bias = bias.detach()[:, :, piece.queries, piece.keys]
                    mask = piece_bias if mask is None else piece_bias.masked_fill(~mask, -torch.inf)
                q, k, v = piece.cut(query, key, value)
                (piece_out,) = piece.cut(out)
                piece_out.copy_(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True))
            return out
        # A piece is one row of the batch with its queries and keys, cut into blocks along its queries. The r query
        # heads of a group share their keys, so their queries are one matrix [r * q, d]. A causal block sees only the
        # first keys of its piece, as many as p [g, r * q, k] has columns.
        with onednn_matmuls():
            for piece in ctx.pieces:
                row = piece.row.start
                transposed_k = _transposed(key[row, :, piece.keys], in_onednn=True)
                v = value[row, :, piece.keys].contiguous()
                for block in _blocks(piece, query.shape[1]):
                    q = _by_group(query, block, len(v)).float()
                    p = _probabilities(block, q, transposed_k, bias, scale)
                    block_out = torch.bmm(p.to(v.dtype), v[:, : p.shape[2]])
                    out_view = out[row, :, block.queries]
                    out_view.copy_(block_out.view(out_view.shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A pipeline may run the backward pass of inputs and of weights separately. The first call has then already
        # computed the gradient of the bias, and the second returns it. With another `grad`, which is the gradient of
        # another loss, the second call computes it again.
        if ctx.kept and not mpu.needs_grad(ctx, 0):  # input 0 is the query
            kept_grad, kept_version, bias_grad = ctx.kept
            if grad is kept_grad and version_counter(grad) == kept_version:
                return None, None, None, bias_grad, None, None, None
        query, key, value, bias = ctx.saved_tensors
        scale: float = ctx.scale
        wide_dtype = mpu.wide_dtype(query)
        factor_dtype = query.dtype if ctx.in_onednn else wide_dtype
        query_grad = empty_like_linear(query)
        key_grad = empty_like_linear(key)
        value_grad = empty_like_linear(value)
        bias_grad = None if bias is None else torch.zeros_like(bias, dtype=wide_dtype)
        with onednn_matmuls() if ctx.in_onednn else nullcontext():
            for piece in ctx.pieces:
                row = piece.row.start
                transposed_k = _transposed(key[row, :, piece.keys], ctx.in_onednn)
                transposed_v = _transposed(value[row, :, piece.keys], ctx.in_onednn)
                k = key[row, :, piece.keys].to(factor_dtype).contiguous()
                k_grad = torch.zeros_like(k, dtype=wide_dtype)
                v_grad = torch.zeros_like(k_grad)
                for block in _blocks(piece, query.shape[1]):
                    q = _by_group(query, block, len(k))
                    out_grad = _by_group(grad, block, len(k))
                    p = _probabilities(block, q.to(wide_dtype), transposed_k, bias, scale)
                    seen = slice(0, p.shape[2])  # of the piece's keys
                    p_grad = torch.bmm(out_grad.to(wide_dtype), transposed_v[:, :, seen])
                    score_grad = softmax_backward(p_grad, p)
                    if bias_grad is not None:
                        bias_view = bias_grad[0, :, block.queries, block.keys]
                        bias_view += score_grad.view(bias_view.shape)
                    score_grad = score_grad.to(factor_dtype)
                    q_grad = torch.bmm(score_grad, k[:, seen]).mul_(scale)
                    q_view = query_grad[row, :, block.queries]
                    q_view.copy_(q_grad.view(q_view.shape))
                    k_grad[:, seen] += torch.bmm(score_grad.mT, q.to(factor_dtype))
                    v_grad[:, seen] += torch.bmm(p.to(factor_dtype).mT, out_grad.to(factor_dtype))
                key_grad[row, :, piece.keys] = k_grad.mul_(scale)
                value_grad[row, :, piece.keys] = v_grad

        if bias_grad is not None:
            bias_grad = bias_grad.to(bias.dtype)
            if not mpu.needs_grad(ctx, 3):  # input 3 is the bias
                ctx.kept = grad, version_counter(grad), bias_grad  # for the second call
                bias_grad = None
        return query_grad, key_grad, value_grad, bias_grad, None, None, None


def _transposed(x: Tensor, in_onednn: bool) -> Tensor:
    """Return keys or values [g, k, d] as [g, d, k], in fp32 or fp64; oneDNN copies blocks of views with each call."""
    transposed = x.mT.to(mpu.wide_dtype(x))
    return transposed.contiguous() if in_onednn else transposed


def _by_group(x: Tensor, block: Piece, groups: int) -> Tensor:
    """Return the block's part of x [b, n, q, d] as [g, r * q, d]: queries that share keys are one matrix."""
    return x[block.row.start, :, block.queries].reshape(groups, -1, x.shape[3])


def _probabilities(block: Piece, query: Tensor, transposed_key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Return softmax(scale * q k^T + bias) [g, r * q, k] of a block: query [g, r * q, d], key [g, d, k or more]."""
    queries = block.queries.stop - block.queries.start
    keys = block.keys.stop - block.keys.start
    transposed_key = transposed_key[:, :, :keys]
    if bias is None:
        scores = torch.bmm(query, transposed_key).mul_(scale)
    else:
        block_bias = bias[0, :, block.queries, block.keys].reshape(*query.shape[:2], keys).to(query.dtype)
        scores = torch.baddbmm(block_bias, query, transposed_key, alpha=scale)
    scores_by_head = scores.view(-1, queries, keys)
    # Adding minus infinity is faster than masked_fill_.
    if block.causal:  # the last query sees all keys, the one before all but one, and so on
        scores_by_head += torch.full((queries, keys), -torch.inf).triu_(keys - queries + 1)
    if block.mask is None:
        return torch.softmax(scores, -1)
    mask = block.mask[0]
    sees_any = mask.any(-1, keepdim=True)
    # A query that sees no key stays unmasked here, because the softmax of minus infinities would be NaN.
    scores_by_head += torch.where(mask | ~sees_any, 0.0, -torch.inf)
    p = torch.softmax(scores, -1)
    p.view(scores_by_head.shape).mul_(sees_any)  # zeros for a query that sees no key, as in torch's kernel
    return p

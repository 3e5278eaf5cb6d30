"""Flash attention on a CPU, computed for one block of queries and keys after another.

It serves attention within documents and attention with context parallelism. The blocks are the `Pieces` of pieces.py.
A query's results from several blocks are combined by their log-sum-exps (Milakov and Gimelshein 2018). The backward
pass of a block needs only the combined result. Keys and values gathered from the context ranks are not saved; the
backward pass gathers them again.

Shapes: q queries, k keys, b batch, n query heads and g key-value heads of this rank, d width of a head, c context
ranks.
"""

from typing import Any

import torch
from torch import Tensor

from megatron import mpu
from megatron._torch import flash_on_cpu, flash_on_cpu_backward

from .context_attention import gather_kv_without_grad, reduce_scatter_grads
from .heads import repeat_heads, sum_repeated
from .pieces import Pieces


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, axis: mpu.Axis | None = None
) -> Tensor:
    """Compute attention piece by piece: query [b, n, q, d], key, value [b, g, k, d] -> [b, n, q, d].

    g: number of key-value heads. pieces: each piece is a block of queries with the block of keys that they attend to.
    axis: the c context-parallel ranks, or None. With an axis, key and value are this rank's shards [b, g, k/c, d], and
    all ranks of the axis must run the forward and the backward pass together.
    """
    out: Tensor = _FlashAttention.apply(query, key, value, pieces, scale, axis)  # type: ignore[no-untyped-call]
    return out


def empty_like_linear(like: Tensor) -> Tensor:
    """Return an empty tensor [b, n, s, d] like `like`, stored as [s, b, n, d], the layout of the linear layers."""
    b, n, s, d = like.shape
    return like.new_empty(s, b, n, d).permute(1, 2, 0, 3)


class _FlashAttention(torch.autograd.Function):
    """`flash_attention`, which saves the output and the log-sum-exp of each query [b, n, q]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, axis: mpu.Axis | None
    ) -> Tensor:
        sums_dtype = mpu.wide_dtype(query)
        out = empty_like_linear(query)
        log_sums = query.new_empty(query.shape[:3], dtype=sums_dtype)
        keys, values = repeat_heads(query, *gather_kv_without_grad(key, value, axis))
        for piece in pieces.items:
            q, k, v = piece.cut(query, keys, values)
            (piece_out,) = piece.cut(out)
            (piece_log_sums,) = piece.cut(log_sums)
            new_out, new_log_sums = flash_on_cpu(q, k, v, piece.added(q.dtype), piece.causal, scale)
            if piece.adds_to_earlier:
                # Both outputs are divided by their own sum of exponentials; weight them by its share of the total.
                total = torch.logaddexp(piece_log_sums, new_log_sums)
                earlier_weight = (piece_log_sums - total).exp_().unsqueeze(-1)
                new_weight = (new_log_sums - total).exp_().unsqueeze(-1)
                new_out = piece_out * earlier_weight + new_out * new_weight
                new_log_sums = total
            piece_out.copy_(new_out)
            piece_log_sums.copy_(new_log_sums)
        ctx.pieces = pieces
        ctx.scale = scale
        ctx.axis = axis
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, log_sums = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        keys, values = repeat_heads(query, *gather_kv_without_grad(key, value, ctx.axis))
        query_grad = empty_like_linear(query)
        key_grad = empty_like_linear(keys)
        value_grad = empty_like_linear(values)
        if not pieces.each_key_once:
            key_grad.zero_()
            value_grad.zero_()
        for piece in pieces.items:
            q, k, v = piece.cut(query, keys, values)
            (piece_grad,) = piece.cut(grad)
            (piece_out,) = piece.cut(out)
            (piece_log_sums,) = piece.cut(log_sums)
            q_grad, k_grad, v_grad = flash_on_cpu_backward(
                piece_grad, q, k, v, piece_out, piece_log_sums, piece.added(q.dtype), piece.causal, ctx.scale
            )
            # A piece adds to gradients to which an earlier piece may have written, and overwrites all others.
            q_view, k_view, v_view = piece.cut(query_grad, key_grad, value_grad)
            if piece.adds_to_earlier:
                q_view.add_(q_grad)
            else:
                q_view.copy_(q_grad)
            if pieces.each_key_once:
                k_view.copy_(k_grad)
                v_view.copy_(v_grad)
            else:
                k_view.add_(k_grad)
                v_view.add_(v_grad)
        key_grad, value_grad = sum_repeated(key.shape[1], key_grad, value_grad)
        return query_grad, *reduce_scatter_grads(key_grad, value_grad, ctx.axis), None, None, None

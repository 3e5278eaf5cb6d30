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

from .context_attention import reduce_scatter_grads, whole_keys_and_values
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
    return _FlashAttention.apply(query, key, value, pieces, scale, axis)  # type: ignore[no-untyped-call,no-any-return]


def _laid_out(like: Tensor) -> Tensor:
    """Return an empty tensor [b, n, s, d] like `like`, stored as [s, b, n, d], the layout of the linear layers."""
    b, n, s, d = like.shape
    return like.new_empty(s, b, n, d).permute(1, 2, 0, 3)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, axis: mpu.Axis | None
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = _laid_out(query)
        sums = query.new_empty(query.shape[:3], dtype=wide)
        keys, values = repeat_heads(query, *whole_keys_and_values(key, value, axis))
        for piece in pieces.found:
            q, k, v = piece.cut(query, keys, values)
            (here,), (there,) = piece.cut(out), piece.cut(sums)
            of_here, of_there = flash_on_cpu(q, k, v, piece.added(q.dtype), piece.causal, scale)
            if piece.more:
                both = torch.logaddexp(there, of_there)
                before, now = ((x - both).exp_().unsqueeze(-1) for x in (there, of_there))
                of_here = here * before + of_here * now
                of_there = both
            here.copy_(of_here)
            there.copy_(of_there)
        ctx.pieces = pieces
        ctx.scale = scale
        ctx.axis = axis
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, sums = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        keys, values = repeat_heads(query, *whole_keys_and_values(key, value, ctx.axis))
        of_query = _laid_out(query)
        of_key = _laid_out(keys)
        of_value = _laid_out(values)
        if not pieces.once:
            of_key.zero_()
            of_value.zero_()
        for piece in pieces.found:
            q, k, v = piece.cut(query, keys, values)
            g, o, s = (piece.cut(x)[0] for x in (grad, out, sums))
            found = flash_on_cpu_backward(g, q, k, v, o, s, piece.added(q.dtype), piece.causal, ctx.scale)
            places = piece.cut(of_query, of_key, of_value)
            added = piece.more, not pieces.once, not pieces.once
            for place, part, adds in zip(places, found, added, strict=True):
                place.add_(part) if adds else place.copy_(part)
        of_key, of_value = sum_repeated(key.shape[1], of_key, of_value)
        return of_query, *reduce_scatter_grads(of_key, of_value, ctx.axis), None, None, None

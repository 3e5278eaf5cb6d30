"""Attention within documents without a mask: on a CPU each chunk of documents (chunks.py) is computed separately.

Work falls from the square of a row's length to the sum of the squares of its documents' lengths, and no
[b, 1, q, k] mask is built.

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from typing import Any

import torch
from torch import Tensor

from megatron._torch import flash_on_cpu, flash_on_cpu_backward, has_flash_on_cpu

from .chunks import Chunk, Chunks, chunks_of
from .masks import Documents, added_mask


def chunks_for(query: Tensor, documents: Documents) -> Chunks | None:
    """Return the chunks by which to compute query [b, n, q, d]; None if a mask is faster or required."""
    if query.device.type != "cpu" or torch.compiler.is_compiling() or not has_flash_on_cpu():
        return None
    return chunks_of(documents)


def document_attention(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, scale: float) -> Tensor:
    """Compute attention chunk by chunk: query [b, n, q, d], key, value [b, n, k, d] -> [b, n, q, d]."""
    return _DocumentAttention.apply(query, key, value, chunks, scale)  # type: ignore[no-untyped-call,no-any-return]


def laid_out(like: Tensor) -> Tensor:
    """Return an empty tensor [b, n, s, d] like `like`, stored as [s, b, n, d], the layout of the layers around it."""
    b, n, s, d = like.shape
    return like.new_empty(s, b, n, d).permute(1, 2, 0, 3)


def parts(chunk: Chunk, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return views [1, n, ..., ...] of query [b, n, q, ...] and others [b, n, k, ...], restricted to the chunk."""
    row, queries, keys, _ = chunk
    return query[row, :, queries], *(x[row, :, keys] for x in others)


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, scale: float) -> Tensor:
        out, sums = laid_out(query), query.new_empty(query.shape[:3], dtype=_wide(query))
        for chunk in chunks.found:
            q, k, v = parts(chunk, query, key, value)
            here, there = parts(chunk, out)[0], parts(chunk, sums)[0]
            of_here, of_there = flash_on_cpu(q, k, v, _added(chunk, q), _causal(chunk, chunks), scale)
            here.copy_(of_here)
            there.copy_(of_there)
        ctx.chunks, ctx.scale = chunks, scale
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, sums = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        of_query, of_key, of_value = laid_out(query), laid_out(key), laid_out(value)
        if not chunks.once:
            of_key.zero_()
            of_value.zero_()
        for chunk in chunks.found:
            q, k, v = parts(chunk, query, key, value)
            g, o, s = (parts(chunk, x)[0] for x in (grad, out, sums))
            found = flash_on_cpu_backward(g, q, k, v, o, s, _added(chunk, q), _causal(chunk, chunks), ctx.scale)
            places = parts(chunk, of_query, of_key, of_value)
            places[0].copy_(found[0])
            for place, part in zip(places[1:], found[1:], strict=True):
                place.copy_(part) if chunks.once else place.add_(part)
        return of_query, of_key, of_value, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _added(chunk: Chunk, like: Tensor) -> Tensor | None:
    return None if chunk.mask is None else added_mask(chunk.mask, like.dtype)


def _causal(chunk: Chunk, chunks: Chunks) -> bool:
    return chunks.causal and chunk.mask is None

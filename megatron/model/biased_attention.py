"""Attention with a learned bias on a CPU, which saves neither scores nor probabilities for the backward pass.

torch's fused attention on a CPU has no gradient for the bias. torch's alternative saves probabilities
[b, n, q, k] in every layer. Here they are recomputed sample by sample or document by document, so that they
stay in the cache (the recomputation of Dao et al. 2022).

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron._torch import softmax_backward

from .chunks import Chunk, Chunks
from .masks import causal_mask


def serves(query: Tensor, bias: Tensor) -> bool:
    """Return whether torch would save the probabilities of query [b, n, q, d] and bias [1, n, q, k].

    Accelerators have a fused kernel that differentiates the bias, too.
    """
    return query.device.type == "cpu" and torch.is_grad_enabled() and bias.requires_grad


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sees: Tensor | Chunks | None, scale: float
) -> Tensor:
    """Compute attention: query [b, n, q, d], key, value [b, n, k, d], bias [1, n, q, k] -> [b, n, q, d].

    sees: bool mask [1 or b, 1, q, k], or the chunks of self-attention within documents, or None.
    """
    return _BiasedAttention.apply(query, key, value, bias, sees, scale)  # type: ignore[no-untyped-call,no-any-return]


def _pieces(query: Tensor, mask: Tensor | None, chunks: Chunks | None, by_row: bool) -> Iterable[Chunk]:
    """Yield the pieces to compute one after another, each with its mask.

    Without documents these are whole rows, all at once or one by one.
    """
    everything = slice(None)
    if chunks is not None:
        for chunk in chunks.found:
            q = chunk.queries.stop - chunk.queries.start
            alone = chunks.causal and chunk.mask is None
            yield chunk._replace(mask=causal_mask(q, q, query.device)) if alone else chunk
    elif by_row:
        for i in range(len(query)):
            of_row = mask[i : i + 1] if mask is not None and len(mask) > 1 else mask
            yield Chunk(slice(i, i + 1), everything, everything, of_row)
    else:
        yield Chunk(everything, everything, everything, mask)


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sees: Tensor | Chunks | None, scale: float
    ) -> Tensor:
        mask, ctx.chunks = (None, sees) if isinstance(sees, Chunks) else (sees, None)
        ctx.scale, ctx.rest = scale, None
        ctx.save_for_backward(query, key, value, bias, mask)
        out = torch.empty_like(query)
        for row, queries, keys, seen in _pieces(query, mask, ctx.chunks, by_row=False):
            scores = bias.detach()[:, :, queries, keys]  # torch's fused kernel rejects a bias that requires a gradient
            scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
            at = row, slice(None), queries
            k, v = key[row, :, keys], value[row, :, keys]
            out[at] = F.scaled_dot_product_attention(query[at], k, v, attn_mask=scores, scale=scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # A pipeline may split the backward pass in two. In the second part the gradient of the bias is already
        # there.
        if ctx.rest is not None and not mpu.is_asked_for(ctx, 0):
            return None, None, None, ctx.rest, None, None
        query, key, value, bias, mask = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        added, of_bias = bias[0].to(wide), torch.zeros_like(bias, dtype=wide)
        for row, queries, keys, seen in _pieces(query, mask, ctx.chunks, by_row=True):
            mine, theirs = (row, slice(None), queries), (row, slice(None), keys)
            q, k, v, g = (x[0].to(wide) for x in (query[mine], key[theirs], value[theirs], grad[mine]))
            scores = torch.baddbmm(added[:, queries, keys], q, k.mT, alpha=ctx.scale)
            if seen is not None:
                scores.masked_fill_(~seen[0], -torch.inf)
            p = torch.softmax(scores, -1)
            of_value[theirs] = p.mT @ g
            of_scores = softmax_backward(g @ v.mT, p)
            of_bias[0, :, queries, keys] += of_scores
            of_query[mine] = (of_scores @ k).mul_(ctx.scale)
            of_key[theirs] = (of_scores.mT @ q).mul_(ctx.scale)
        if mpu.is_asked_for(ctx, 3):
            return of_query, of_key, of_value, of_bias.to(bias.dtype), None, None
        ctx.rest = of_bias.to(bias.dtype)
        return of_query, of_key, of_value, None, None, None

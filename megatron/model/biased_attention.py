"""Attention whose scores have a learned bias, on a CPU: neither scores nor probabilities are kept for the backward pass.

torch's fused attention on a CPU has no gradient for the bias. Without it [b, n, q, k] probabilities are kept for
every layer; here they are computed again, sample by sample, so that they stay in the cache (the recomputation of
Dao et al. 2022).

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron._torch import softmax_backward


def serves(query: Tensor, bias: Tensor) -> bool:
    """Whether torch would keep the probabilities of query [b, n, q, d] and bias [1, n, q, k]: accelerators have a fused kernel that differentiates the bias, too."""
    return query.device.type == "cpu" and torch.is_grad_enabled() and bias.requires_grad


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """query [b, n, q, d], key, value [b, n, k, d], bias [1, n, q, k], mask [1 or b, 1, q, k] or None -> [b, n, q, d]."""
    return _BiasedAttention.apply(query, key, value, bias, mask, scale)  # type: ignore[no-untyped-call,no-any-return]


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        ctx.scale, ctx.rest = scale, None
        ctx.save_for_backward(query, key, value, bias, mask)
        scores = bias.detach()  # or torch would not take its fused kernel
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=scores, scale=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # In the second half of a backward pass that a pipeline has cut in two, what is asked for is there already.
        if ctx.rest is not None and not mpu.is_asked_for(ctx, 0):
            return None, None, None, ctx.rest, None, None
        query, key, value, bias, mask = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        added, of_bias = bias[0].to(wide), torch.zeros_like(bias, dtype=wide)
        for i in range(len(query)):
            q, k, v, g = (x[i].to(wide) for x in (query, key, value, grad))
            scores = torch.baddbmm(added, q, k.mT, alpha=ctx.scale)
            if mask is not None:
                scores.masked_fill_(~mask[i if len(mask) > 1 else 0], -torch.inf)
            p = torch.softmax(scores, -1)
            of_value[i] = p.mT @ g
            of_scores = softmax_backward(g @ v.mT, p)
            of_bias[0] += of_scores
            of_query[i] = (of_scores @ k).mul_(ctx.scale)
            of_key[i] = (of_scores.mT @ q).mul_(ctx.scale)
        if mpu.is_asked_for(ctx, 3):
            return of_query, of_key, of_value, of_bias.to(bias.dtype), None, None
        ctx.rest = of_bias.to(bias.dtype)
        return of_query, of_key, of_value, None, None, None

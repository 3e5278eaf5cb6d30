"""Self-attention within documents on CUDA by torch's kernel for packed sequences (Dao 2023), which needs no mask.

Like attention by pieces on a CPU (pieces.py), the kernel computes no scores between tokens of different documents.
Shapes: s sequence, b batch, n heads of this rank, d width of a head.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .masks import Documents, cached_on, document_starts


def supports_packing(query: Tensor, documents: Documents) -> bool:
    """Return whether torch's packed-sequence kernel exists and accepts query [b, n, s, d] and these documents.

    The kernel needs torch >= 2.11 and Ampere or later. In compiled code this returns False, because the compiler fuses
    attention with a mask. The check synchronises with the device once per batch.
    """
    width = query.shape[-1]
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.compiler.is_compiling() or documents.keys is not None:  # in cross-attention, keys have ids of their own
        return False
    if width % 8 or width > 256 or varlen_kernel() is None:  # the widths that FlashAttention accepts
        return False
    major, _ = torch.get_device_module(query.device).get_device_capability(query.device)
    return major >= 8 and compute_cu_seqlens(documents) is not None


@functools.cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's function `varlen_attn`; None if it has no arguments for scale and window, as before torch 2.11."""
    from torch.nn.attention.varlen import varlen_attn

    arguments = set(inspect.signature(varlen_attn).parameters)
    return varlen_attn if {"scale", "window_size"} <= arguments else None


def compute_cu_seqlens(documents: Documents) -> Tensor | None:
    """Return the start of each document among all tokens, and the number of tokens: int32 [documents + 1].

    Tokens are numbered row after row of the batch. Returns None if a document is split or has a prefix.
    Only the device knows the number of documents, so the host waits for the device, once for all layers. A tensor of
    fixed length would avoid the wait, but it would need an entry per token, and the kernel launches blocks for each
    entry.
    """
    ids = documents.queries
    return cached_on(ids, ("cu_seqlens",), lambda: _compute_cu_seqlens(ids))


def _compute_cu_seqlens(ids: Tensor) -> Tensor | None:
    """Compute the result of `compute_cu_seqlens` for document ids [b, s]."""
    is_start = document_starts(ids)
    # Sorting joins the parts of a split document, so the sorted ids have fewer starts.
    is_start_if_sorted = document_starts(ids.sort(dim=1).values)
    is_split = is_start_if_sorted.sum() != is_start.sum()
    has_prefix = ids.min() < 0  # a negative id marks a prefix
    if is_split | has_prefix:
        return None
    starts = is_start.flatten().nonzero().flatten()
    end = torch.full((1,), ids.numel(), device=ids.device)
    return torch.cat([starts, end]).int()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float) -> Tensor:
    """Compute attention within documents: query, key, value [b, n, s, d] -> [b, n, s, d].

    Call this only if `supports_packing(query, documents)`.
    """
    varlen_attn = varlen_kernel()
    cu_seqlens = compute_cu_seqlens(documents)
    b, _, s, _ = query.shape
    assert varlen_attn is not None and cu_seqlens is not None
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [b * s, n, d]
    window = (-1, 0) if documents.causal else (-1, -1)  # tokens seen before and after a query; -1 for all
    out: Tensor = varlen_attn(*packed, cu_seqlens, cu_seqlens, s, s, scale=scale, window_size=window)
    return out.view(b, s, *out.shape[1:]).transpose(1, 2)

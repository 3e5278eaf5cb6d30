"""Attention kernels for documents, a bias, context parallelism, and dropout on a CPU.

`KERNELS` says which is used when.

Shapes: q queries, k keys, b batch, n query heads and g key-value heads of this rank, d width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import emulates
from .attention_kernels import AttentionArgs, Kernel, attend, choose_kernel, torchs
from .heads import repeat_heads
from .masks import Documents


def in_fp32(c: AttentionArgs) -> Tensor:
    """Attend in fp32 and round the result, on CPUs that emulate 16-bit matmuls -> [b, n, q, d]."""
    bias = None if c.bias is None else c.bias.float()
    wide = c._replace(query=c.query.float(), key=c.key.float(), value=c.value.float(), bias=bias)
    return choose_kernel(wide)(wide).to(c.query.dtype)


def flash_in_pieces(c: AttentionArgs) -> Tensor:
    """Run torch's flash attention for CPUs on one block of queries and keys after another -> [b, n, q, d]."""
    from .flash_attention import flash_attention

    assert c.pieces is not None
    axis = c.views.axis if c.views else None
    return flash_attention(c.query, c.key, c.value, c.pieces, c.scale, axis)


def slice_by_slice(c: AttentionArgs) -> Tensor:
    """Attend from each slice of this context rank to the gathered keys -> [b, n, q, d]."""
    from .context_attention import gather_keys_and_values

    views = c.views
    assert views is not None
    found = []
    key, value = gather_keys_and_values(c.key, c.value, views.axis)
    for at, own in enumerate(torch.split(c.query, views.each, 2)):
        begin, end = views.keys(at)
        keys = key[:, :, begin:end]
        values = value[:, :, begin:end]
        needs_mask = views.masked or c.p or c.on_cpu or torch.compiler.is_compiling()
        if needs_mask:
            result = attend(c._replace(query=own, key=keys, value=values, mask=views.mask(at), turn=at))
        else:
            result = _lower_right(own, keys, values, c.scale)
        found.append(result)
    return torch.cat(found, 2)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally without a mask tensor; the last query [b, n, q, d] sees the last key [b, g, k, d]."""
    from torch.nn.attention.bias import causal_lower_right  # imported late, because it loads torch.compile

    keys, values = repeat_heads(query, key, value)
    causal: Any = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=causal, scale=scale)


def biased(c: AttentionArgs) -> Tensor:
    """Attend with a learned bias, recomputing the probabilities in the backward pass -> [b, n, q, d]."""
    from .biased_attention import biased_attention

    assert c.bias is not None
    sees: Any = c.pieces
    if c.pieces is None:
        sees, _ = c.visible()
    key, value = repeat_heads(c.query, c.key, c.value)
    return biased_attention(c.query, key, value, c.bias, sees, c.scale)


def dropout_in_pieces(c: AttentionArgs) -> Tensor:
    """Attend with dropout document by document -> [b, n, q, d]."""
    from .attention_dropout import by_document

    assert c.pieces is not None
    key, value = repeat_heads(c.query, c.key, c.value)
    return by_document(c.query, key, value, c.pieces, c.scale, c.p, c.stream)


def dropout(c: AttentionArgs) -> Tensor:
    """Attend with dropout by torch's matmul, softmax and dropout operations -> [b, n, q, d]."""
    from .attention_dropout import attention_with_dropout

    added, _ = c.added()
    key, value = repeat_heads(c.query, c.key, c.value)
    return attention_with_dropout(c.query, key, value, added, c.scale, c.p, c.stream, c.turn)


def packed(c: AttentionArgs) -> Tensor:
    """Run torch's kernel for packed documents on CUDA -> [b, n, q, d]."""
    from .packed_attention import packed_attention

    assert isinstance(c.mask, Documents)
    key, value = repeat_heads(c.query, c.key, c.value)
    return packed_attention(c.query, key, value, c.mask, c.scale)


def _packs(c: AttentionArgs) -> bool:
    if not (c.by_document and c.packs and isinstance(c.mask, Documents)):
        return False
    from .packed_attention import serves

    return serves(c.query, c.mask)


def _differentiates_bias(c: AttentionArgs) -> bool:
    if not c.fused_bias or c.bias is None:
        return False
    from .biased_attention import serves

    return serves(c.query, c.bias)


# (condition, kernel): the first kernel whose condition holds computes the call. The mask is a `Views` only with context
# parallelism, which does not support a bias.
KERNELS: tuple[tuple[Callable[[AttentionArgs], Any], Kernel], ...] = (
    (lambda c: c.packs and c.on_cpu and emulates(c.query.dtype), in_fp32),
    (lambda c: c.pieces and not c.p and c.bias is None, flash_in_pieces),
    (lambda c: c.views, slice_by_slice),
    (lambda c: c.pieces and not c.p and c.fused_bias, biased),
    (lambda c: c.pieces and c.pieces.once and c.bias is None, dropout_in_pieces),
    (lambda c: not c.p and c.bias is None and _packs(c), packed),
    (lambda c: not c.p and _differentiates_bias(c), biased),
    (lambda c: c.p and c.on_cpu, dropout),
    (lambda c: True, torchs),
)


def choose_special_kernel(c: AttentionArgs) -> Kernel:
    """Return the first kernel of KERNELS whose condition holds for the call."""
    for serves, kernel in KERNELS:
        if serves(c):
            return kernel
    raise AssertionError("the last kernel of KERNELS must accept every call")

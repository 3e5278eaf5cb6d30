"""Attention kernels for documents, a bias, context parallelism, and dropout on a CPU.

`KERNELS` says which is used when.

Shapes: q queries, k keys, b batch, n query heads and g key-value heads of this rank, d width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import emulates_matmul, has_amx_tiles, onednn_is_there
from .attention_kernels import AttentionArgs, Kernel, attend, choose_kernel, torch_sdpa
from .heads import repeat_heads
from .masks import Documents

# Limits of attention in blocks without a bias. Generation has one query. With many heads and keys, a block has too few
# queries. With many threads, torch's kernel is faster, because it divides the heads of all samples among them. With
# AMX, it is always faster.
MIN_CALL_QUERIES = 128
MAX_HEADS_TIMES_KEYS = 2**16
MAX_THREADS = 8


def attend_in_fp32(call: AttentionArgs) -> Tensor:
    """Attend in fp32 and round the result, on CPUs that emulate 16-bit matmuls -> [b, n, q, d]."""
    bias = None if call.bias is None else call.bias.float()
    fp32_call = call._replace(query=call.query.float(), key=call.key.float(), value=call.value.float(), bias=bias)
    kernel = choose_kernel(fp32_call)  # the one that would compute a call in fp32, which is not emulated
    return kernel(fp32_call).to(call.query.dtype)


def flash_in_pieces(call: AttentionArgs) -> Tensor:
    """Run torch's flash attention for CPUs on one block of queries and keys after another -> [b, n, q, d]."""
    from .flash_attention import flash_attention

    assert call.pieces is not None
    axis = call.views.axis if call.views else None
    return flash_attention(call.query, call.key, call.value, call.pieces, call.scale, axis)


def slice_by_slice(call: AttentionArgs) -> Tensor:
    """Attend from each slice of this context rank to the gathered keys -> [b, n, q, d]."""
    from .context_attention import gather_keys_and_values

    views = call.views
    assert views is not None
    outputs = []
    key, value = gather_keys_and_values(call.key, call.value, views.axis)  # [b, g, s, d] of the whole sequence
    for slice_index, query_slice in enumerate(torch.split(call.query, views.slice_length, 2)):
        begin, end = views.key_range(slice_index)
        keys = key[:, :, begin:end]
        values = value[:, :, begin:end]
        # torch needs no mask tensor in eager code on an accelerator, if only later tokens are hidden.
        is_eager_on_accelerator = not call.on_cpu and not torch.compiler.is_compiling()
        if is_eager_on_accelerator and not views.needs_mask and not call.p:
            # imported late, because it loads torch.compile
            from torch.nn.attention.bias import causal_lower_right

            # The last query sees the last key.
            causal: Any = causal_lower_right(query_slice.shape[2], keys.shape[2])
            keys, values = repeat_heads(query_slice, keys, values)
            result = F.scaled_dot_product_attention(query_slice, keys, values, attn_mask=causal, scale=call.scale)
        else:
            # With a plain mask in place of `views`, the slice is an ordinary call, for which `attend` finds a kernel.
            mask = views.mask(slice_index)
            result = attend(call._replace(query=query_slice, key=keys, value=values, mask=mask, draw_index=slice_index))
        outputs.append(result)
    return torch.cat(outputs, 2)


def _with_repeated_heads(call: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [b, n, q or k, d], with a head of keys and values for each head of the queries."""
    key, value = repeat_heads(call.query, call.key, call.value)
    return call.query, key, value


def attend_in_blocks(call: AttentionArgs) -> Tensor:
    """Attend on a CPU, recomputing the probabilities in the backward pass -> [b, n, q, d]."""
    from .block_attention import block_attention

    # scope: the pieces, which hide later keys themselves; or else a bool mask or None, and whether to hide later keys.
    scope: Any = call.pieces
    causal = False
    if call.pieces is None:
        scope, causal = call.visible()
    return block_attention(call.query, call.key, call.value, call.bias, scope, call.scale, causal)


def dropout_in_pieces(call: AttentionArgs) -> Tensor:
    """Attend with dropout document by document -> [b, n, q, d]."""
    from .attention_dropout import dropout_by_document

    assert call.pieces is not None
    return dropout_by_document(*_with_repeated_heads(call), call.pieces, call.scale, call.p, call.stream)


def attend_with_dropout(call: AttentionArgs) -> Tensor:
    """Attend with dropout by torch's matmul, softmax and dropout operations -> [b, n, q, d]."""
    from .attention_dropout import attention_with_dropout

    added, _ = call.added()  # with dropout on a CPU, it also hides later keys
    heads = _with_repeated_heads(call)
    return attention_with_dropout(*heads, added, call.scale, call.p, call.stream, call.draw_index)


def attend_packed(call: AttentionArgs) -> Tensor:
    """Run torch's kernel for packed documents on CUDA -> [b, n, q, d]."""
    from .packed_attention import packed_attention

    assert isinstance(call.mask, Documents)
    return packed_attention(*_with_repeated_heads(call), call.mask, call.scale)


def _can_pack(call: AttentionArgs) -> bool:
    """Return whether `attend_packed` can compute the call."""
    if not (call.allow_per_document and call.may_copy_qkv and isinstance(call.mask, Documents)):
        return False
    from .packed_attention import supports_packing

    return supports_packing(call.query, call.mask)


def _saves_bias_memory(call: AttentionArgs) -> bool:
    """Return whether `attend_in_blocks` may compute the call and needs less memory than torch's attention.

    It does on a CPU if the bias requires a gradient, because torch then keeps the attention probabilities for the
    backward pass. Accelerators have a fused kernel that computes the bias's gradient without kept probabilities.
    """
    if not call.allow_fused_bias or call.bias is None:
        return False
    return call.on_cpu and torch.is_grad_enabled() and call.bias.requires_grad


def _is_emulated(call: AttentionArgs) -> bool:
    """Return whether the call is in 16 bits on a CPU that emulates matmuls in them; compiled code cannot ask."""
    return call.on_cpu and not torch.compiler.is_compiling() and emulates_matmul(call.query.dtype)


def _suits_blocks(call: AttentionArgs) -> bool:
    """Return whether `attend_in_blocks` may compute the call and is faster: in bf16, for many queries of one length."""
    if not call.on_cpu or call.query.dtype != torch.bfloat16:
        return False
    if not call.allow_fused_bias or torch.compiler.is_compiling() or _is_emulated(call):
        return False
    _, heads, queries, _ = call.query.shape
    keys = call.key.shape[2]
    is_long = queries >= MIN_CALL_QUERIES
    has_large_blocks = heads * keys <= MAX_HEADS_TIMES_KEYS
    has_few_threads = torch.get_num_threads() <= MAX_THREADS
    return is_long and has_large_blocks and has_few_threads and onednn_is_there() and not has_amx_tiles()


# (condition, kernel): the first kernel whose condition holds computes the call; the last one accepts every call. The
# mask is a `ContextViews` only with context parallelism, which does not support a bias.
KERNELS: tuple[tuple[Callable[[AttentionArgs], Any], Kernel], ...] = (
    (lambda call: call.may_copy_qkv and _is_emulated(call), attend_in_fp32),
    (lambda call: call.pieces and not call.p and call.bias is None, flash_in_pieces),
    (lambda call: call.views, slice_by_slice),
    (lambda call: not call.p and call.bias is None and _suits_blocks(call), attend_in_blocks),
    (lambda call: call.pieces and not call.p and call.allow_fused_bias, attend_in_blocks),
    (lambda call: call.pieces and call.pieces.each_key_once and call.bias is None, dropout_in_pieces),
    (lambda call: not call.p and call.bias is None and _can_pack(call), attend_packed),
    (lambda call: not call.p and _saves_bias_memory(call), attend_in_blocks),
    (lambda call: call.p and call.on_cpu, attend_with_dropout),
    (lambda call: True, torch_sdpa),
)

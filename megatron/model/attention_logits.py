"""The largest attention logit of a call, which fused attention kernels do not return.

Shapes: b batch, n query heads and g key-value heads of this rank, q queries, k keys, d width of a head.
"""

import torch
from torch import Tensor

from .attention_kernels import AttentionArgs
from .context_attention import ContextViews, gather_kv_without_grad
from .masks import causal_mask

MAX_LOGITS = 1 << 24  # logits in memory at once
MAX_QUERIES = 128  # queries whose logits are computed at once


@torch.no_grad()
def largest_logit(call: AttentionArgs, text: Tensor | None = None) -> Tensor:
    """Return the largest logit, q k^T x scale + bias, over all keys that a query may see: a scalar, in fp32 or fp64.

    text: bool [b, q], False for queries that are padding and do not count; None if all count.

    With context parallelism, gather the keys of all ranks, so all of them must call this.
    """
    if not isinstance(call.mask, ContextViews):
        return _largest_of_block(call, text)
    views = call.mask
    key, value = gather_kv_without_grad(call.key, call.value, views.axis)
    # This rank holds two slices of the sequence, each of which sees another range of keys.
    largest_by_slice = []
    text_slices = None if text is None else torch.split(text, views.slice_length, 1)
    for slice_index, query in enumerate(torch.split(call.query, views.slice_length, 2)):
        begin, end = views.key_range(slice_index)
        mask = views.mask(slice_index)
        if mask is None:
            mask = causal_mask(query.shape[2], end - begin, query.device)
        # The values are not cut, because logits do not depend on them.
        slice_call = call._replace(query=query, key=key[:, :, begin:end], value=value, mask=mask)
        slice_text = None if text_slices is None else text_slices[slice_index]
        largest_by_slice.append(_largest_of_block(slice_call, slice_text))
    return torch.stack(largest_by_slice).max()


def _largest_of_block(call: AttentionArgs, text: Tensor | None) -> Tensor:
    """Return the largest logit of a call with all of its keys; `text` as above. Some queries are computed at a time."""
    mask, is_causal = call.visible()
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    b, n, q, d = call.query.shape
    g, k = call.key.shape[1:3]
    key = call.key.detach().to(dtype).transpose(-1, -2).unsqueeze(2)  # [b, g, 1, d, k]
    maxima = []
    # At least one query, even if its logits of all heads and keys are more than MAX_LOGITS.
    queries_at_once = min(max(MAX_LOGITS // max(b * n * k, 1), 1), MAX_QUERIES)
    for begin in range(0, q, queries_at_once):
        block = slice(begin, begin + queries_at_once)
        query = call.query.detach()[:, :, block].to(dtype)
        num_queries = query.shape[2]
        num_keys = begin + num_queries if is_causal else k  # later keys are hidden
        # The n // g query heads of a group use the same key head: [b, g, n // g, queries, d] @ [b, g, 1, d, keys].
        by_group = query.reshape(b, g, n // g, -1, d)
        logits = (by_group @ key[..., :num_keys]).view(b, n, -1, num_keys)
        # Without a bias, only the maximum is scaled, below: one multiplication instead of one for each logit.
        if call.bias is not None:
            logits.mul_(call.scale).add_(call.bias.detach()[:, :, block])

        # Logits of hidden keys and of padding become -inf, so they are never the largest.
        if is_causal:  # of the visible keys, only those of this block of queries may be later than a query
            visible = causal_mask(num_queries, num_queries, query.device)
            logits[..., begin:].masked_fill_(~visible, -torch.inf)
        elif mask is not None:
            logits.masked_fill_(~mask[:, :, block], -torch.inf)
        if text is not None:
            logits.masked_fill_(~text[:, None, block, None], -torch.inf)
        maxima.append(logits.max())

    largest = torch.stack(maxima).max()
    if call.bias is not None:
        return largest  # the logits are already scaled
    return largest * call.scale

"""The largest attention logit of a call, which fused attention kernels do not return.

Shapes: b batch, n query heads and g key-value heads of this rank, q queries, k keys, d width of a head.
"""

import torch
from torch import Tensor

from .attention_kernels import AttentionArgs
from .context_attention import Views, whole_keys_and_values

AT_ONCE, ROWS = 1 << 24, 128  # largest numbers of logits in memory, and of queries whose logits are computed at once


@torch.no_grad()
def largest_logit(c: AttentionArgs, text: Tensor | None = None) -> Tensor:
    """Return the largest logit, q k^T x scale + bias, over all keys that a query may see: a scalar, in fp32 or fp64.

    text: bool [b, q], False for queries that are padding and do not count; None if all count.

    With context parallelism, gather the keys of all ranks, so all of them must call this.
    """
    if not isinstance(c.mask, Views):
        return _largest(c, text)
    views = c.mask
    key, value = whole_keys_and_values(c.key, c.value, views.axis)
    found = []
    texts = None if text is None else torch.split(text, views.each, 1)
    for at, query in enumerate(torch.split(c.query, views.each, 2)):
        begin, end = views.keys(at)
        mask = views.mask(at)
        if mask is None:
            q = query.shape[2]
            k = end - begin
            mask = torch.ones(1, 1, q, k, dtype=torch.bool, device=query.device).tril(k - q)
        seen = c._replace(query=query, key=key[:, :, begin:end], value=value, mask=mask)
        found.append(_largest(seen, None if texts is None else texts[at]))
    return torch.stack(found).max()


def _largest(c: AttentionArgs, text: Tensor | None) -> Tensor:
    mask, hides = c.visible()
    dtype = torch.promote_types(c.query.dtype, torch.float32)
    b, n, q, d = c.query.shape
    g, k = c.key.shape[1:3]
    key = c.key.detach().to(dtype).transpose(-1, -2).unsqueeze(2)  # [b, g, 1, d, k]
    found = []
    rows = min(max(AT_ONCE // max(b * n * k, 1), 1), ROWS)
    for begin in range(0, q, rows):
        query = c.query.detach()[:, :, begin : begin + rows].to(dtype)
        last = begin + query.shape[2] if hides else k  # later keys are hidden
        logits = (query.reshape(b, g, n // g, -1, d) @ key[..., :last]).view(b, n, -1, last)
        if c.bias is not None:
            logits.mul_(c.scale).add_(c.bias.detach()[:, :, begin : begin + rows])
        if hides:
            seen = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
            logits[..., begin:].masked_fill_(~seen, -torch.inf)
        elif mask is not None:
            logits.masked_fill_(~mask[:, :, begin : begin + rows], -torch.inf)
        if text is not None:
            logits.masked_fill_(~text[:, None, begin : begin + rows, None], -torch.inf)
        found.append(logits.max())
    largest = torch.stack(found).max()
    return largest if c.bias is not None else largest * c.scale

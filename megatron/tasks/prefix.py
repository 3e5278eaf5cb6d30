"""Prefix LM for a decoder: bidirectional attention within the prefix, loss after it (--objective prefix-lm)."""

import torch
from torch import Tensor


def with_prefixes(prefixes: Tensor, document_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Negate the document ids of prefixes, and mask out the loss of tokens whose target is within the prefix.

    prefixes: [b, s], 1 in a prefix. document_ids: [b, s] or empty. loss_mask: [b, s].
    Returns the document ids, negative in prefixes, and the loss mask, both [b, s]. The last token of a prefix keeps
    its loss, because it predicts the first token after the prefix.
    """
    numbers = document_ids + 1 if document_ids.numel() else torch.ones_like(prefixes, dtype=torch.int32)
    inside = prefixes.bool()
    seen = torch.zeros_like(inside)
    seen[:, :-1] = inside[:, :-1] & inside[:, 1:]
    return torch.where(inside, -numbers, numbers), loss_mask.masked_fill(seen, 0.0)

"""Prefix-LM training of a decoder: bidirectional attention within the prefix, loss only on the tokens after the prefix.

It is selected by --objective prefix-lm.
"""

import torch
from torch import Tensor


def with_prefixes(prefixes: Tensor, document_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Negate the document ids of prefix tokens, and set the loss mask to 0 where the label is a prefix token.

    prefixes: [b, s], 1 for prefix tokens, else 0. document_ids: [b, s] or empty. loss_mask: [b, s].
    Returns (document ids, loss mask), both [b, s]. The last token of a prefix keeps its loss because its label is the
    first token after the prefix.
    """
    numbers = document_ids if document_ids.numel() else torch.ones_like(prefixes, dtype=torch.int32)
    inside = prefixes.bool()
    seen = torch.zeros_like(inside)
    seen[:, :-1] = inside[:, :-1] & inside[:, 1:]
    return torch.where(inside, -numbers, numbers), loss_mask.masked_fill(seen, 0.0)

"""A decoder that reads the beginning of a text both ways and writes the rest (--objective prefix-lm)."""

import torch
from torch import Tensor


def with_prefixes(prefixes: Tensor, document_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """prefixes [b, s] 1 in a prefix, document ids [b, s] or empty, loss mask [b, s] -> the ids with those of prefixes negative, and the loss mask.

    A token of a prefix that is followed by one of it has seen its target, which does not count. The last one predicts what comes after the prefix.
    """
    numbers = document_ids + 1 if document_ids.numel() else torch.ones_like(prefixes, dtype=torch.int32)
    inside = prefixes.bool()
    seen = torch.zeros_like(inside)
    seen[:, :-1] = inside[:, :-1] & inside[:, 1:]
    return torch.where(inside, -numbers, numbers), loss_mask.masked_fill(seen, 0.0)

"""Prefix-LM training of a decoder: bidirectional attention within the prefix, loss only on the tokens after the prefix.

It is selected by --objective prefix-lm.
"""

import torch
from torch import Tensor


def mark_prefixes(prefixes: Tensor, document_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Negate the document ids of prefix tokens, and set the loss mask to 0 where a token and its label are in a prefix.

    prefixes: [b, s], 1 for prefix tokens, else 0. document_ids: [b, s], or empty if each sample is one document.
    loss_mask: [b, s].
    Returns (document ids, loss mask), both [b, s]. The last token of a prefix keeps its loss because its label is the
    first token after the prefix. So does the token before the prefix of a later document: its label, the first token of
    this prefix, counts.
    """
    ids = document_ids if document_ids.numel() else torch.ones_like(prefixes, dtype=torch.int32)
    in_prefix = prefixes.bool()
    label_in_prefix = torch.zeros_like(in_prefix)
    # The label of a token is the next token: the prefixes 1 1 1 0 0 give 1 1 0 0 0.
    label_in_prefix[:, :-1] = in_prefix[:, :-1] & in_prefix[:, 1:]
    # A negative document id marks a token of a prefix, to which the whole prefix attends.
    signed_ids = torch.where(in_prefix, -ids, ids)
    return signed_ids, loss_mask.masked_fill(label_in_prefix, 0.0)

"""Helpers for entry scripts, under the names that Megatron's tutorials use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron import mpu
from megatron.mpu.vocab_shards import reduce_in_place


def get_ltor_documents_and_position_ids(
    tokens: Tensor, eod: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the inputs that GPT-2 and Llama models take along with their tokens [b, s].

    An end-of-document token belongs to the document that it ends.
    Returns (document ids, loss mask, position ids):
    - document ids: int32 [b, s], the number of each token's document, from 1; empty unless `reset_attention_mask`.
      The attention builds its mask from them (`megatron.model.masks`).
    - loss mask: fp32 [b, s], 0 at end-of-document tokens if `eod_mask_loss`.
    - position ids: int64 [b, s], counted from 0 in each document if `reset_position_ids`.
    """
    b, s = tokens.shape
    is_eod = tokens == eod
    positions = torch.arange(s, device=tokens.device).expand(b, s)
    documents = torch.ones_like(tokens)
    documents[:, 1:] += is_eod[:, :-1].cumsum(dim=1)  # 1 + the number of end-of-document tokens before a token
    if reset_position_ids:
        # Of 5 tokens 0 to 4, let token 2 end a document. Then `document_begins` is 0 0 0 3 0, its cummax() is the begin
        # of each token's document, 0 0 0 3 3, and the positions become 0 1 2 0 1.
        document_begins = torch.zeros_like(tokens)
        document_begins[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)
        positions = positions - document_begins.cummax(dim=1).values
    document_ids = documents.int() if reset_attention_mask else torch.empty(0, dtype=torch.int32, device=tokens.device)
    loss_mask = torch.ones(b, s, dtype=torch.float32, device=tokens.device)
    if eod_mask_loss:
        loss_mask.masked_fill_(is_eod, 0.0)
    return document_ids, loss_mask, positions


def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute inputs for a model that takes an attention mask, as in Megatron-LM, instead of document ids.

    Returns (attention mask, loss mask, position ids). The mask is bool, True where a query (row) must not
    attend to a key (column): [b, 1, s, s] if `reset_attention_mask`, else [1, 1, s, s]. Loss mask and
    position ids are as in `get_ltor_documents_and_position_ids`.
    """
    document_ids, loss_mask, positions = get_ltor_documents_and_position_ids(
        data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss
    )
    s = data.shape[1]
    hidden = torch.ones(1, s, s, dtype=torch.bool, device=data.device).triu(1)
    if reset_attention_mask:
        hidden = hidden | (document_ids.unsqueeze(2) != document_ids.unsqueeze(1))
    return hidden.unsqueeze(1), loss_mask, positions


def reduce_losses(losses: Sequence[Tensor]) -> Tensor:
    """Average each scalar over the data-parallel ranks -> [len(losses)]."""
    reduced = torch.stack([loss.detach().float().view(()) for loss in losses])
    data = mpu.get_mesh().data
    return reduce_in_place(reduced, data) / data.size

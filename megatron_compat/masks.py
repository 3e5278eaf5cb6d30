"""Attention masks of CPM-Pretrain, and their conversion to the document ids that this project's models take.

Shapes: b batch size, s sequence length of a decoder-only model, k encoder length, q decoder length.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.model.masks import Documents, document_starts, no_documents, positions_in_documents

ADVICE = (
    "masks must be causal or restrict attention to documents; "
    "pass document ids instead (megatron.utils.get_ltor_documents_and_position_ids)"
)


class T5Masks(NamedTuple):
    """Masks of an encoder-decoder, nonzero where attention is allowed.

    encoder: [b, 1, k, k]. decoder: [b, 1, q, q]. cross: [b, 1, q, k].
    """

    encoder: Tensor
    decoder: Tensor
    cross: Tensor


def get_masks_and_position_ids_for_t5(
    args: Any,
    tokenizer: Any,
    contexts: Tensor,
    targets: Tensor,
    labels: Tensor,
    ctx_eod_mask: Tensor,
    reset_position_ids: bool,
    reset_attention_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the masks and positions of CPM-Pretrain's T5 for contexts [b, k], targets and labels [b, q].

    ctx_eod_mask: int [b, k], nonzero at the last token of each document of the encoder.
    Returns (encoder mask fp32 [b, 1, k, k], encoder positions int64 [b, k], decoder mask [b, 1, q, q], decoder
    positions [b, q], cross mask [b, 1, q, k], loss mask fp32 [b, q]). Attention masks are 1 where attention is
    allowed. The loss mask is 0 where a target is the end of a document or a label is padding.
    Unlike in CPM-Pretrain, text tokens do not attend to padding.
    Raises ValueError if `reset_attention_mask` is set and the decoder has more documents than the encoder.
    """
    is_end = targets == tokenizer.eod_id
    has_label = labels != tokenizer.pad_id
    encoder_ids = _document_ids(ctx_eod_mask != 0, contexts == tokenizer.pad_id)
    decoder_ids = _document_ids(is_end, ~has_label & (targets == tokenizer.pad_id))
    if reset_attention_mask and (encoder_ids.amax(1) < decoder_ids.amax(1)).any():
        raise ValueError(
            "--reset-attention-mask: the decoder has more documents than the encoder; mask the corpus with "
            "--span-convention cpm, so that a document ends in the encoder and in the decoder of the same sample"
        )
    # All text becomes document 1, and padding stays document 0.
    if not reset_attention_mask:
        encoder_ids = encoder_ids.clamp(max=1)
        decoder_ids = decoder_ids.clamp(max=1)
    positions_of = positions_in_documents if reset_position_ids else _sequence_positions
    encoder_positions = positions_of(encoder_ids)
    decoder_positions = positions_of(decoder_ids)
    loss_mask = (~is_end & has_label).float()
    encoder, decoder, cross = (mask.float() for mask in _t5_masks(encoder_ids, decoder_ids))
    return encoder, encoder_positions, decoder, decoder_positions, cross, loss_mask


def _document_ids(is_end: Tensor, padding: Tensor) -> Tensor:
    """Return the document number of each token, int64 [b, s]: 1, 2, ... for text, 0 for padding.

    is_end: bool [b, s], True at the last token of each document. padding: bool [b, s].
    """
    numbers = torch.ones_like(is_end, dtype=torch.int64)
    # A token belongs to the next document if the token before it ends one.
    numbers[:, 1:] += is_end[:, :-1].cumsum(dim=1)
    return numbers.masked_fill_(padding, 0)


def _sequence_positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)


def _t5_masks(encoder_ids: Tensor, decoder_ids: Tensor) -> T5Masks:
    encoder = Documents(encoder_ids).mask()
    decoder = Documents(decoder_ids, causal=True).mask()
    cross = Documents(decoder_ids, encoder_ids).mask()
    return T5Masks(encoder, decoder, cross)


def decoder_documents(mask: Tensor, tokens: Tensor) -> Tensor:
    """Return document ids int16 [b, s] equivalent to an attention mask [1 or b, 1, s, s].

    If each sample is a single document, the result is an empty tensor.
    mask: bool, True where attention is forbidden. tokens: [b, s].
    Raises ValueError if document ids cannot express the mask.
    """
    s = tokens.shape[1]
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:] != (1, s, s):
        raise ValueError(
            f"an attention mask of GPT2Model is bool [1 or b, 1, s, s], not {mask.dtype} {list(mask.shape)}; {ADVICE}"
        )
    allowed = ~mask
    ids = _group_rows(allowed)
    expected = Documents(ids, causal=True).mask()
    _check_equal("attention", allowed, expected)
    if not (ids > 1).any():
        return no_documents(tokens.device)
    return ids.short().expand(tokens.shape)


def t5_documents(given: T5Masks) -> tuple[Tensor, Tensor]:
    """Return encoder and decoder document ids, int16 [b, k] and [b, q], equivalent to a T5's attention masks.

    If each sample is a single document, both results are empty tensors.
    given: masks, nonzero where attention is allowed.
    Raises ValueError if document ids cannot express the masks.
    """
    encoder, decoder, cross = (mask != 0 for mask in given)
    encoder_ids = _group_rows(encoder)
    decoder_groups = _group_rows(decoder)
    # The document of the first encoder token that each decoder token attends to.
    attended_ids = encoder_ids.gather(1, cross[:, 0].int().argmax(-1))
    sees_all = cross[:, 0].all(-1)
    has_several = (encoder_ids.amax(1, keepdim=True) > 1) | (decoder_groups > 1)
    # Encoder ids start at 1. A decoder token that attends to the whole encoder sequence, although the sample has
    # several documents, gets id 0: its document is not in the encoder.
    decoder_ids = attended_ids.masked_fill(sees_all & has_several, 0)
    expected = _t5_masks(encoder_ids, decoder_ids)
    for name, ours, theirs in zip(T5Masks._fields, expected, given, strict=True):
        _check_equal(name, theirs != 0, ours)
    if (encoder_ids == 1).all() and (decoder_ids == 1).all():
        return no_documents(encoder.device), no_documents(encoder.device)
    return encoder_ids.short(), decoder_ids.short()


def check_positions(name: str, given: Tensor, document_ids: Tensor, reset: bool) -> None:
    """Raise ValueError unless the positions `given` [b, s] count from 0.

    name: "encoder" or "decoder", for the message. reset: whether positions must restart at 0 in each document.
    """
    # No ids: the sample is a single document, whose positions are those of the sequence.
    restart = reset and document_ids.numel() > 0
    expected = positions_in_documents(document_ids) if restart else _sequence_positions(given)
    if not torch.equal(given, expected.to(given.dtype)):
        raise ValueError(
            f"the {name} positions given to T5Model must count from 0 over each "
            f"{'document' if restart else 'sequence'}; "
            "pass the positions that get_masks_and_position_ids_for_t5 returns"
        )


def _group_rows(allowed: Tensor) -> Tensor:
    """Return a group number for each row of `allowed` [b, 1, s, s]: int64 [b, s].

    Neighbouring rows with the same first True column are a group.
    """
    # Of equal values, argmax returns the first.
    first = allowed[:, 0].int().argmax(-1)
    return document_starts(first).cumsum(1)


def _check_equal(name: str, given: Tensor, expected: Tensor) -> None:
    if torch.equal(given, expected):
        return
    sample, _, query, key = (given != expected).nonzero()[0].tolist()
    raise ValueError(
        f"the {name} mask cannot be expressed by document ids: first mismatch in sample {sample}, where token {query} "
        f"{'attends' if given[sample, 0, query, key] else 'does not attend'} to token {key}; {ADVICE}"
    )

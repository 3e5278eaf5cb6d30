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
    # A decoder may start with the padding token. As this token has a label, it is no padding.
    is_padding = ~has_label & (targets == tokenizer.pad_id)
    decoder_ids = _document_ids(is_end, is_padding)
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
    return T5Masks(
        encoder=Documents(encoder_ids).mask(),
        decoder=Documents(decoder_ids, causal=True).mask(),
        cross=Documents(decoder_ids, encoder_ids).mask(),
    )


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
    # The ids are right if they give the same mask. No ids give a mask that is not causal, for example.
    expected = Documents(ids, causal=True).mask()
    _check_equal("attention", allowed, expected)
    # Ids count from 1, so without a larger one each sample is a single document.
    if not (ids > 1).any():
        return no_documents(tokens.device)
    # A mask [1, 1, s, s] holds for all samples; its ids [1, s] become [b, s].
    return ids.short().expand(tokens.shape)


def t5_documents(given: T5Masks) -> tuple[Tensor, Tensor]:
    """Return encoder and decoder document ids, int16 [b, k] and [b, q], equivalent to a T5's attention masks.

    If each sample is a single document, both results are empty tensors.
    given: masks, nonzero where attention is allowed.
    Raises ValueError if document ids cannot express the masks.
    """
    encoder, decoder, cross = (mask != 0 for mask in given)
    # Ids count from 1. Two documents and padding, which attends only to padding, give 1 1 2 2 3.
    encoder_ids = _group_rows(encoder)
    decoder_groups = _group_rows(decoder)
    # A decoder token belongs to the document of the first encoder token that it attends to: argmax finds the first.
    first_attended = cross[:, 0].int().argmax(-1)
    decoder_ids = encoder_ids.gather(1, first_attended)
    # A decoder token whose document is not in the encoder attends to the whole encoder. It gets the id 0, which no
    # encoder token has. In a sample of one document, each token attends to the whole encoder, and keeps its id.
    sees_all = cross[:, 0].all(-1)
    has_several = (encoder_ids.amax(1, keepdim=True) > 1) | (decoder_groups > 1)
    decoder_ids = decoder_ids.masked_fill(sees_all & has_several, 0)
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
    """Number the documents that an attention mask `allowed` [b, 1, s, s] implies: int64 [b, s], for each token.

    The first token that a token may attend to is the first one of its document. Neighbouring tokens with the same first
    token are therefore a document: the first tokens 0 0 2 2 give the numbers 1 1 2 2.
    """
    # Of equal values, argmax returns the first.
    first_attended = allowed[:, 0].int().argmax(-1)
    return document_starts(first_attended).cumsum(1)


def _check_equal(name: str, given: Tensor, expected: Tensor) -> None:
    if torch.equal(given, expected):
        return
    sample, _, query, key = (given != expected).nonzero()[0].tolist()
    raise ValueError(
        f"the {name} mask cannot be expressed by document ids: first mismatch in sample {sample}, where token {query} "
        f"{'attends' if given[sample, 0, query, key] else 'does not attend'} to token {key}; {ADVICE}"
    )

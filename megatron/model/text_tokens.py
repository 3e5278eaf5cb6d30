"""Masks and counts of the tokens that are text, not padding, for routers and --log-layers.

Shapes: s sequence, b batch, n stacks of layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron import mpu

from .masks import cached_on


class Text(NamedTuple):
    """Mask and number of the tokens of a micro-batch that are text, not padding.

    mask: bool [s, b], True where a token of this rank's shard is text. total: scalar in fp64, the number of text tokens
    of the whole micro-batch, divided by the number of context-parallel ranks.
    """

    mask: Tensor
    total: Tensor


def text_tokens(document_ids: Tensor, sequence: mpu.Axis, context: mpu.Axis) -> Text | None:
    """Return which tokens are text by the document ids [b, s] of the whole sequence; None for empty ids: all are text.

    sequence, context: the ranks over which sequence and context parallelism shard the tokens.
    """
    if not document_ids.numel():
        return None

    def make() -> Text:
        is_text = document_ids != 0  # [b, s]
        local_text = mpu.shard_sequence(is_text.t(), 0, context)  # [s/c, b] on each of c context ranks
        # Losses are averaged over the context ranks, so each rank divides by its share of the tokens.
        total = is_text.sum(dtype=torch.float64) / context.size
        return Text(mpu.local_shard(local_text, 0, sequence), total)

    return cached_on(document_ids, ("text", sequence.size, context.size), make)


def count_text_tokens(tokens: Tensor, document_ids: Tensor, context: mpu.Axis) -> Tensor:
    """Return the number of text tokens of tokens [b, s] with document ids [b, s] or [0], as fp64 [1].

    It is divided by the number of context-parallel ranks, see `Text`.
    """
    if not document_ids.numel():
        # All are text. `tokens` are only this rank's, unlike document ids, so they are not divided again.
        return torch.full((1,), tokens.numel(), dtype=torch.float64, device=tokens.device)
    is_text = document_ids != 0
    return is_text.sum(dtype=torch.float64).view(1) / context.size

"""Attention with dropout on a CPU, for which torch has no kernel: plain operations, with masks from a named stream.

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron import mpu

from .chunks import Chunk, Chunks
from .masks import added_mask, causal_mask


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    scale: float,
    p: float,
    stream: mpu.Stream,
    turn: int = 0,
) -> Tensor:
    """Compute attention with dropout: query [b, n, q, d], key, value [b, n, k, d] -> [b, n, q, d].

    added: [1 or b, 1 or n, q, k], added to the scores, or None. turn: see `mpu.Stream.drop`.
    """
    return _attend(query, key, value, added, scale, lambda weights: stream.drop(weights, p, turn))


def by_document(
    query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, scale: float, p: float, stream: mpu.Stream
) -> Tensor:
    """Compute attention with dropout chunk by chunk: query [b, n, q, d] -> [b, n, q, d]; every key is in one chunk.

    Each chunk takes its part of one mask for all q x k weights, so dropout does not depend on the chunks.
    """
    kept = stream.keep_mask((*query.shape[:3], key.shape[2]), p, query.device, torch.bool)
    rows = []
    for i, (of_row, *inputs) in enumerate(zip(kept, query, key, value, strict=True)):
        here = [chunk for chunk in chunks.found if chunk.row.start == i]
        of_queries, of_keys = [_length(chunk.queries) for chunk in here], [_length(chunk.keys) for chunk in here]
        pieces = (x.split(sizes, 1) for x, sizes in zip(inputs, (of_queries, of_keys, of_keys), strict=True))
        found = []
        for chunk, q, k, v in zip(here, *pieces, strict=True):
            factors = of_row[:, chunk.queries, chunk.keys].to(query.dtype).div_(1 - p or 1.0)
            found.append(_attend(q, k, v, _added(chunk, chunks.causal, q.dtype), scale, factors.mul))
        rows.append(torch.cat(found, 1))
    return torch.stack(rows)


def _length(stretch: slice) -> int:
    return int(stretch.stop - stretch.start)


def _added(chunk: Chunk, causal: bool, dtype: torch.dtype) -> Tensor | None:
    sees, length = chunk.mask, _length(chunk.queries)
    if sees is None and causal:
        sees = causal_mask(length, length, torch.device("cpu"))
    return None if sees is None else added_mask(sees, dtype)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    scores = (query * scale) @ key.mT
    return drop(torch.softmax(scores if added is None else scores + added, -1)) @ value

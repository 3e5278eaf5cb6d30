"""Attention with dropout on a CPU, composed of matmuls and softmax, because torch has no such kernel.

The dropout masks are drawn from a named random stream.

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron import mpu

from .masks import added_mask
from .pieces import Pieces


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

    added: tensor [1 or b, 1 or n, q, k] to add to the scores, or None. turn: number that distinguishes several dropout
    draws of one layer, see `mpu.Stream.drop`.
    """
    return _attend(query, key, value, added, scale, lambda weights: stream.drop(weights, p, turn))


def by_document(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, p: float, stream: mpu.Stream
) -> Tensor:
    """Compute attention with dropout piece by piece: query [b, n, q, d], key, value [b, n, k, d] -> [b, n, q, d].

    pieces: blocks of queries and keys; every key must be in exactly one block. A single dropout mask is drawn for all
    q x k attention weights, and each block uses its part of the mask, so dropout does not depend on the blocks.
    """
    kept = stream.keep_mask((*query.shape[:3], key.shape[2]), p, query.device, torch.bool)
    rows = []
    for i, (of_row, *inputs) in enumerate(zip(kept, query, key, value, strict=True)):
        here = [piece for piece in pieces.found if piece.row.start == i]
        of_queries = [_length(piece.queries) for piece in here]
        of_keys = [_length(piece.keys) for piece in here]
        queries = inputs[0].split(of_queries, 1)
        keys = inputs[1].split(of_keys, 1)
        values = inputs[2].split(of_keys, 1)
        found = []
        for piece, q, k, v in zip(here, queries, keys, values, strict=True):
            factors = of_row[:, piece.queries, piece.keys].to(query.dtype).div_(1 - p or 1.0)
            sees = piece.visible(query.device)
            added = None
            if sees is not None:
                added = added_mask(sees, q.dtype)[0]
            found.append(_attend(q, k, v, added, scale, factors.mul))
        rows.append(torch.cat(found, 1))
    return torch.stack(rows)


def _length(tokens: slice) -> int:
    return int(tokens.stop - tokens.start)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, scale: float, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    scores = (query * scale) @ key.mT
    if added is not None:
        scores = scores + added
    weights = drop(torch.softmax(scores, -1))
    return weights @ value

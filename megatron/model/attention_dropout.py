"""Attention with dropout on a CPU, composed of matmuls and softmax, because torch has no such kernel.

The dropout masks are drawn from a named random stream. On CPUs with 16-bit instructions, scores and probabilities are
rounded to the dtype of the query, as in Megatron-LM's unfused attention. fp32 would need twice the memory.

Shapes: q queries, k keys, b batch, n heads of this rank, d width of a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron import mpu

from .masks import to_additive_mask
from .pieces import Pieces


def attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    additive_mask: Tensor | None,
    scale: float,
    p: float,
    stream: mpu.Stream,
    draw_index: int = 0,
) -> Tensor:
    """Compute attention with dropout: query [b, n, q, d], key, value [b, n, k, d] -> [b, n, q, d].

    additive_mask: tensor [1 or b, 1 or n, q, k] to add to the scores, or None. draw_index: number that distinguishes
    several dropout draws of one layer, see `mpu.Stream.drop`.
    """

    def drop(weights: Tensor) -> Tensor:
        return stream.drop(weights, p, draw_index)

    return _attend(query, key, value, additive_mask, scale, drop)


def dropout_by_document(
    query: Tensor, key: Tensor, value: Tensor, pieces: Pieces, scale: float, p: float, stream: mpu.Stream
) -> Tensor:
    """Compute attention with dropout piece by piece: query [b, n, q, d], key, value [b, n, k, d] -> [b, n, q, d].

    pieces: blocks of queries and keys; every key must be in exactly one block. A single dropout mask is drawn for all
    q x k attention weights, and each block uses its part of the mask, so dropout does not depend on the blocks.
    """
    keep_prob = 1.0 if p == 1 else 1 - p  # p = 1 keeps nothing, and 0 / 0 would be NaN
    mask_shape = (*query.shape[:3], key.shape[2])
    keep_mask = stream.keep_mask(mask_shape, p, query.device, torch.bool)
    rows = []
    for i, (keep_row, query_row, key_row, value_row) in enumerate(zip(keep_mask, query, key, value, strict=True)):
        row_pieces = []
        query_lengths = []
        key_lengths = []
        for piece in pieces.items:
            if piece.row.start == i:
                row_pieces.append(piece)
                query_lengths.append(piece.queries.stop - piece.queries.start)
                key_lengths.append(piece.keys.stop - piece.keys.start)
        # One split of the row gives all blocks, since the pieces cover it in order. Autograd then concatenates the
        # gradients of the blocks. For separate slices, it would instead sum gradients of the size of the row.
        queries = query_row.split(query_lengths, 1)
        keys = key_row.split(key_lengths, 1)
        values = value_row.split(key_lengths, 1)
        outputs = []
        for piece, q, k, v in zip(row_pieces, queries, keys, values, strict=True):
            keep_block = keep_row[:, piece.queries, piece.keys]  # bool [n, queries, keys] of the block
            keep_factors = keep_block.to(query.dtype)
            visible = piece.visible(query.device)
            additive_mask = None if visible is None else to_additive_mask(visible, q.dtype)[0]  # without the batch
            output = _attend(q, k, v, additive_mask, scale, keep_factors.mul)  # weights x 0 or 1
            outputs.append(output.mul_(1 / keep_prob))  # the other factor of dropout, which may follow the matmul
        rows.append(torch.cat(outputs, 1))
    return torch.stack(rows)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    additive_mask: Tensor | None,
    scale: float,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute attention, [..., q, d] and [..., k, d] -> [..., q, d]; `drop` is applied to the weights [..., q, k]."""
    scores = (query * scale) @ key.mT
    if additive_mask is not None:
        scores = scores + additive_mask
    weights = drop(torch.softmax(scores, -1))
    return weights @ value

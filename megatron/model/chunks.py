"""Where the documents of a batch begin and end, found once for all layers: what attention within documents goes through one by one.

Shapes: b batch, q queries, k keys. Document ids: see masks.py.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Documents, follows

SMALL = 64  # tokens; a chunk of less costs more to call than to compute


class Chunk(NamedTuple):
    """Queries of one row of the batch, the keys that they look at, and who of them sees whom: bool [1, 1, q, k], or None as below."""

    row: slice
    queries: slice
    keys: slice
    mask: Tensor | None


class Chunks(NamedTuple):
    """Every query of a batch once. Without a mask of its own a chunk is one document: each sees all of it, or (causal) what is not after itself.

    once: every key is in exactly one chunk, too.
    """

    found: tuple[Chunk, ...]
    causal: bool
    once: bool


class Pair(NamedTuple):
    """The tokens of a document among the queries, and among the keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def chunks_of(documents: Documents) -> Chunks | None:
    """The chunks of document ids [b, q] and [b, k] on a CPU; None where a document does not stand in one piece, or has a prefix.

    Neighbouring documents share a chunk as long as it has no more than SMALL x SMALL scores.
    The layers that are given the same ids share them.
    """
    queries, keys, causal = documents
    return follows(queries, ("chunks", causal), keys, lambda: _find(documents))


def _find(documents: Documents) -> Chunks | None:
    queries, keys, causal = documents
    if causal and bool((queries < 0).any()):
        return None
    found: list[Chunk] = []
    once = True
    for row in range(len(queries)):
        pairs = _pairs(queries[row], None if keys is None else keys[row])
        if pairs is None:
            return None
        ends = [pair.keys for pair in pairs]
        length = (queries if keys is None else keys).shape[1]
        once = once and [0, *(end for _, end in ends)] == [*(begin for begin, _ in ends), length]
        for group in small_together(pairs):
            of_queries, of_keys = (slice(first[0], last[1]) for first, last in zip(group[0], group[-1], strict=True))
            mask = None
            if len(group) > 1:
                others = queries if keys is None else keys
                mask = queries[row, of_queries, None] == others[row, None, of_keys]
                mask = (mask.tril() if causal else mask)[None, None]
            found.append(Chunk(slice(row, row + 1), of_queries, of_keys, mask))
    return Chunks(tuple(found), causal, once)


def runs(ids: Tensor) -> dict[int, tuple[int, int]] | None:
    """[s] document ids of one row -> the stretch of each id, in their order; None if an id has several."""
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    runs = dict(zip(values.tolist(), pairwise(ends), strict=True))
    return runs if len(runs) == len(values) else None


def _pairs(queries: Tensor, keys: Tensor | None) -> list[Pair] | None:
    """[q], [k] -> each document of the queries with what it looks at: all keys, where it has none of its own."""
    mine = runs(queries)
    theirs = mine if keys is None else runs(keys)
    if mine is None or theirs is None:
        return None
    everything = (0, len(queries if keys is None else keys))
    return [Pair(stretch, theirs.get(number, everything)) for number, stretch in mine.items()]


def small_together(pairs: list[Pair]) -> list[list[Pair]]:
    """Neighbours in one group as long as it has no more than SMALL x SMALL scores."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        if groups and pair.keys[0] == groups[-1][-1].keys[1]:
            first = groups[-1][0]
            if (pair.queries[1] - first.queries[0]) * (pair.keys[1] - first.keys[0]) <= SMALL * SMALL:
                groups[-1].append(pair)
                continue
        groups.append([pair])
    return groups

"""Chunks of documents in a batch, found once for all layers, which attention within documents computes one by one.

Shapes: b batch, q queries, k keys. Document ids: see masks.py.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .masks import Documents, cached_on

SMALL = 64  # tokens; calling a kernel for a smaller chunk costs more than computing it


class Chunk(NamedTuple):
    """Queries of one row of the batch, the keys they attend to, and the mask: bool [1, 1, q, k], or None.

    None means the chunk is one document, see Chunks.
    """

    row: slice
    queries: slice
    keys: slice
    mask: Tensor | None


class Chunks(NamedTuple):
    """All chunks of a batch; every query is in exactly one.

    A chunk without a mask is one document, whose queries see all of it, or (causal) nothing after themselves.
    once: every key is in exactly one chunk, too.
    """

    found: tuple[Chunk, ...]
    causal: bool
    once: bool


class Pair(NamedTuple):
    """Token ranges of one document, among the queries and among the keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def chunks_of(documents: Documents) -> Chunks | None:
    """Return the chunks of document ids [b, q] and [b, k] on a CPU; None if a document is split or has a prefix.

    Neighbouring documents share a chunk as long as it has at most SMALL x SMALL scores. Layers that receive
    the same ids share the result.
    """
    queries, keys, causal = documents
    return cached_on(queries, ("chunks", causal), keys, lambda: _find(documents))


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
        for group in group_short(pairs):
            of_queries, of_keys = (slice(first[0], last[1]) for first, last in zip(group[0], group[-1], strict=True))
            mask = None
            if len(group) > 1:
                others = queries if keys is None else keys
                mask = queries[row, of_queries, None] == others[row, None, of_keys]
                mask = (mask.tril() if causal else mask)[None, None]
            found.append(Chunk(slice(row, row + 1), of_queries, of_keys, mask))
    return Chunks(tuple(found), causal, once)


def runs(ids: Tensor) -> dict[int, tuple[int, int]] | None:
    """Return the range of each document id of one row [s], in order; None if an id has several ranges."""
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    runs = dict(zip(values.tolist(), pairwise(ends), strict=True))
    return runs if len(runs) == len(values) else None


def _pairs(queries: Tensor, keys: Tensor | None) -> list[Pair] | None:
    """Pair each document of the queries [q] with its keys [k]: those of the same document, or all if there are none."""
    mine = runs(queries)
    theirs = mine if keys is None else runs(keys)
    if mine is None or theirs is None:
        return None
    everything = (0, len(queries if keys is None else keys))
    return [Pair(stretch, theirs.get(number, everything)) for number, stretch in mine.items()]


def group_short(pairs: list[Pair]) -> list[list[Pair]]:
    """Group neighbouring documents as long as a group has at most SMALL x SMALL scores."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        if groups and pair.keys[0] == groups[-1][-1].keys[1]:
            first = groups[-1][0]
            if (pair.queries[1] - first.queries[0]) * (pair.keys[1] - first.keys[0]) <= SMALL * SMALL:
                groups[-1].append(pair)
                continue
        groups.append([pair])
    return groups

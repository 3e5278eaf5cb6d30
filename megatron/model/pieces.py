"""Pieces of attention on a CPU: blocks of queries and keys that kernels compute one by one.

The pieces are found once per batch for all layers.

Attention within documents takes one piece per document, so work falls from the square of a row's length to the
sum of the squares of its documents' lengths, and no [b, 1, q, k] mask is built. Tiny documents share a piece.
With context parallelism, a slice of the sequence may begin inside a document. Then this document's queries in the slice
have two pieces: one with the document's keys in the slice, and one with its keys before the slice.

Shapes: b batch, q queries, k keys, s sequence, n heads, d width of a head. Document ids: see masks.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron._torch import has_flash_on_cpu

from .context_attention import Views
from .masks import Documents, added_mask, cached_on, causal_mask

SMALL = 64  # tokens; calling a kernel for a smaller piece costs more than computing it


class Piece(NamedTuple):
    """Block of attention: queries of one row or of all rows of the batch, and the keys that these queries attend to.

    mask: bool [1, 1, q, k] if several tiny documents share the piece. If None, the queries see all keys, or, if
    `causal`, all except later keys.
    more: whether an earlier piece has the same queries, so that the results must be combined.
    """

    row: slice
    queries: slice
    keys: slice
    mask: Tensor | None = None
    causal: bool = False
    more: bool = False

    def cut(self, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Return views [1, n, ..., ...] of query [b, n, q, ...] and others [b, n, k, ...], restricted to the piece."""
        return query[self.row, :, self.queries], *(x[self.row, :, self.keys] for x in others)

    def visible(self, device: torch.device) -> Tensor | None:
        """Return the mask bool [1, 1, q, k], True where a query sees a key; None if all queries see all keys."""
        if not self.causal:
            return self.mask
        length = self.queries.stop - self.queries.start
        return causal_mask(length, length, device)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """Return `mask` as a tensor [1, 1, q, k] to add to the scores, or None if there is no mask."""
        return None if self.mask is None else added_mask(self.mask, dtype)


class Pieces(NamedTuple):
    """All pieces of a batch. once: whether every key is in exactly one piece."""

    found: tuple[Piece, ...]
    once: bool


def pieces_for(query: Tensor, scope: Documents | Views) -> Pieces | None:
    """Return the pieces (blocks) by which to compute query [b, n, q, d]; None if a mask is faster or required."""
    if query.device.type != "cpu" or torch.compiler.is_compiling() or not has_flash_on_cpu():
        return None
    if isinstance(scope, Documents):
        return pieces_of(scope)
    return _pieces_of_views(scope, len(query))


def pieces_of(documents: Documents) -> Pieces | None:
    """Return the attention pieces (blocks) of ids [b, q] and [b, k]; None if a document is split or has a prefix.

    Layers that receive the same ids share the result.
    """
    queries, keys, causal = documents
    return cached_on(queries, ("pieces", causal), keys, lambda: _of_documents(documents))


def _of_documents(documents: Documents) -> Pieces | None:
    queries, keys, causal = documents
    if causal and bool((queries < 0).any()):
        return None
    others = queries if keys is None else keys
    length = others.shape[1]
    found: list[Piece] = []
    once = True
    for row in range(len(queries)):
        mine = runs(queries[row])
        theirs = mine if keys is None else runs(keys[row])
        if mine is None or theirs is None:
            return None
        padding = theirs.get(0, (length, length))
        if padding[1] < length:
            return None
        text = (0, padding[0] or length)  # queries whose document has no keys see these keys
        rows = slice(row, row + 1)
        pieces = []
        stop = 0
        for number, span in mine.items():
            seen = theirs.get(number, text)
            once = once and seen[0] == stop
            stop = seen[1]
            pieces.append(Piece(rows, slice(*span), slice(*seen), causal=causal))
            if number not in theirs:  # other documents may not share its piece
                found += [*merge_short(pieces[:-1], queries, others), pieces[-1]]
                pieces = []
        once = once and stop == length
        found += merge_short(pieces, queries, others)
    return Pieces(tuple(found), once)


def _pieces_of_views(views: Views, rows: int) -> Pieces | None:
    if views.window is not None:
        return None
    key = "pieces", views.slices, views.apart, rows
    return cached_on(views.ids, key, None, lambda: _of_views(views, rows))


def _of_views(views: Views, rows: int) -> Pieces | None:
    found: list[Piece] = []
    if not views.apart:
        everything = [(0, views.slices[-1][1])]
        return Pieces(tuple(_of_slices(views, slice(0, rows), everything)), once=False)
    for row in range(rows):
        documents = runs(views.ids[row])
        if documents is None:
            return None
        found += _of_slices(views, slice(row, row + 1), list(documents.values()))
    return Pieces(tuple(found), once=False)


def _of_slices(views: Views, row: slice, documents: list[tuple[int, int]]) -> list[Piece]:
    """Return the pieces of attention from this rank's two slices to the keys of all ranks.

    documents: begin and end of each document. A piece numbers its queries within this rank's tokens, but its keys
    within the whole sequence.
    """
    found: list[Piece] = []
    for at, (begin, end) in enumerate(views.slices):
        shift = at * views.each - begin
        pieces = []
        for first, last in documents:
            if first >= end or last <= begin:
                continue
            keys = slice(max(first, begin), min(last, end))
            piece = Piece(row, slice(keys.start + shift, keys.stop + shift), keys, causal=True)
            if first >= begin:
                pieces.append(piece)
            else:  # the document begins before the slice
                found.append(piece)
                found.append(Piece(row, piece.queries, slice(first, begin), more=True))
        found += merge_short(pieces, views.ids, views.ids, shift)
    return found


def merge_short(documents: Sequence[Piece], ids: Tensor, others: Tensor, shift: int = 0) -> list[Piece]:
    """Merge neighbouring documents of one row into pieces of at most SMALL x SMALL scores.

    ids, others: document ids [b, s] of the queries and the keys. shift: number that is added to a token's index in
    `ids` to get its index among the queries.
    """
    found: list[Piece] = []
    merged: set[int] = set()
    for piece in documents:
        if found and piece.keys.start == found[-1].keys.stop:
            queries = slice(found[-1].queries.start, piece.queries.stop)
            keys = slice(found[-1].keys.start, piece.keys.stop)
            if (queries.stop - queries.start) * (keys.stop - keys.start) <= SMALL * SMALL:
                merged.add(len(found) - 1)
                found[-1] = piece._replace(queries=queries, keys=keys)
                continue
        found.append(piece)
    for i in merged:
        piece = found[i]
        row = piece.row.start
        queries = slice(piece.queries.start - shift, piece.queries.stop - shift)
        mask = ids[row, queries, None] == others[row, None, piece.keys]
        if piece.causal:
            mask = mask.tril()
        found[i] = piece._replace(mask=mask[None, None], causal=False)
    return found


def runs(ids: Tensor) -> dict[int, tuple[int, int]] | None:
    """Return {document id: (begin, end) of its tokens} for ids [s] of one row; None if an id has several ranges."""
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    ends = [0, *counts.cumsum(0).tolist()]
    runs = dict(zip(values.tolist(), pairwise(ends), strict=True))
    return runs if len(runs) == len(values) else None

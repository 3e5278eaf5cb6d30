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

from .context_attention import ContextViews
from .masks import Documents, cached_on, causal_mask, to_additive_mask

MERGED_SIZE = 64  # tokens; calling a kernel for a smaller piece costs more than computing it


class Piece(NamedTuple):
    """Block of attention: queries of one row or of all rows of the batch, and the keys that these queries attend to.

    mask: bool [1, 1, q, k] if several tiny documents share the piece. If None, the queries see all keys, or, if
    `causal`, all except later keys.
    adds_to_earlier: whether an earlier piece has the same queries, so that the results must be combined.
    """

    row: slice
    queries: slice
    keys: slice
    mask: Tensor | None = None
    causal: bool = False
    adds_to_earlier: bool = False

    def cut(self, query: Tensor, *key_tensors: Tensor) -> tuple[Tensor, ...]:
        """Return this piece of query [b, n, q, ...] and of key tensors [b, n, k, ...] as views [1, n, ..., ...]."""
        return query[self.row, :, self.queries], *(x[self.row, :, self.keys] for x in key_tensors)

    def visible(self, device: torch.device) -> Tensor | None:
        """Return the mask bool [1, 1, q, k], True where a query sees a key; None if all queries see all keys."""
        if not self.causal:
            return self.mask
        # A causal piece has as many queries as keys.
        length = self.queries.stop - self.queries.start
        return causal_mask(length, length, device)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """Return `mask` as a tensor [1, 1, q, k] to add to the scores, or None if there is no mask."""
        return None if self.mask is None else to_additive_mask(self.mask, dtype)


class Pieces(NamedTuple):
    """All pieces of a batch. each_key_once: whether every key is in exactly one piece."""

    items: tuple[Piece, ...]
    each_key_once: bool


def pieces_for(query: Tensor, scope: Documents | ContextViews) -> Pieces | None:
    """Return the pieces (blocks) by which to compute query [b, n, q, d]; None if a mask is faster or required."""
    if query.device.type != "cpu" or torch.compiler.is_compiling() or not has_flash_on_cpu():
        return None
    if isinstance(scope, Documents):
        return pieces_of(scope)
    return _context_pieces(scope, len(query))


def pieces_of(documents: Documents) -> Pieces | None:
    """Return the attention pieces (blocks) of ids [b, q] and [b, k]; None if a document is split or has a prefix.

    Layers that receive the same ids share the result.
    """
    queries, keys, causal = documents
    return cached_on(queries, ("pieces", causal), lambda: _build_document_pieces(documents), keys)


def _build_document_pieces(documents: Documents) -> Pieces | None:
    """Build the result of `pieces_of`: a piece for each document of each row, tiny documents merged."""
    query_ids, given_key_ids, causal = documents
    if causal and bool((query_ids < 0).any()):
        return None  # attention in both directions within a prefix needs a mask
    key_ids = query_ids if given_key_ids is None else given_key_ids
    length = key_ids.shape[1]
    finished = []
    each_key_once = True
    for row in range(len(query_ids)):
        query_spans = document_spans(query_ids[row])
        key_spans = query_spans if given_key_ids is None else document_spans(given_key_ids[row])
        if query_spans is None or key_spans is None:
            return None  # a document is split
        padding_begin, padding_end = key_spans.get(0, (length, length))  # without padding, an empty span at the end
        if padding_end < length:
            return None  # text follows the padding
        # Queries whose document has no keys see all text. In a row of padding only, padding_begin is 0, and they see
        # all keys.
        text_span = (0, padding_begin or length)
        seen_spans = [key_spans.get(document_id, text_span) for document_id in query_spans]
        each_key_once = each_key_once and _cover_once(seen_spans, length)

        mergeable = []
        for (document_id, query_span), key_span in zip(query_spans.items(), seen_spans, strict=True):
            piece = Piece(slice(row, row + 1), slice(*query_span), slice(*key_span), causal=causal)
            if document_id in key_spans:
                mergeable.append(piece)
            else:  # it sees other documents, so no other document may share its piece
                finished += [*merge_short(mergeable, query_ids, key_ids), piece]
                mergeable = []
        finished += merge_short(mergeable, query_ids, key_ids)
    return Pieces(tuple(finished), each_key_once)


def _cover_once(spans: Sequence[tuple[int, int]], length: int) -> bool:
    """Return whether the spans (begin, end), in this order, cover the numbers from 0 to `length` once."""
    # For example, the spans (0, 3) and (3, 8) begin at 0 and 3 and end at 3 and 8. So each begins where the last ended.
    begins = [begin for begin, _ in spans]
    ends = [end for _, end in spans]
    return [*begins, length] == [0, *ends]


def _context_pieces(views: ContextViews, num_rows: int) -> Pieces | None:
    """Return the pieces for a context rank, shared by layers that receive the same ids; None if a mask is needed."""
    if views.window is not None:
        return None  # a window needs a mask
    key = "pieces", views.slices, views.within_documents, num_rows
    return cached_on(views.ids, key, lambda: _build_context_pieces(views, num_rows))


def _build_context_pieces(views: ContextViews, num_rows: int) -> Pieces | None:
    """Build the result of `_context_pieces`; None if a document is split."""
    pieces = []
    if views.within_documents:
        for row in range(num_rows):
            documents = document_spans(views.ids[row])
            if documents is None:
                return None
            pieces += _pieces_of_slices(views, slice(row, row + 1), list(documents.values()))
    else:
        _, end = views.slices[-1]
        # All rows of the batch, each as one document, up to the last key that this rank's queries see.
        pieces += _pieces_of_slices(views, slice(0, num_rows), [(0, end)])
    return Pieces(tuple(pieces), each_key_once=False)


def _pieces_of_slices(views: ContextViews, row: slice, documents: list[tuple[int, int]]) -> list[Piece]:
    """Return the pieces of attention from this rank's two slices to the keys of all ranks.

    documents: begin and end of each document. A piece numbers its queries within this rank's tokens, but its keys
    within the whole sequence.
    """
    finished = []
    for slice_index, (begin, end) in enumerate(views.slices):
        # Add this to a token's index in the sequence to get its index among this rank's tokens. For example, this rank
        # holds the slices (0, 4) and (12, 16). In the second one, the offset is 4 - 12: token 13 is its token 5.
        query_offset = slice_index * views.slice_length - begin
        mergeable = []
        for document_begin, document_end in documents:
            if document_begin >= end or document_end <= begin:
                continue  # the document has no token in the slice
            keys = slice(max(document_begin, begin), min(document_end, end))
            piece = Piece(row, slice(keys.start + query_offset, keys.stop + query_offset), keys, causal=True)
            if document_begin >= begin:
                mergeable.append(piece)
            else:  # the document begins before the slice; its queries here also see all its keys before the slice
                finished.append(piece)
                finished.append(Piece(row, piece.queries, slice(document_begin, begin), adds_to_earlier=True))
        finished += merge_short(mergeable, views.ids, views.ids, query_offset)
    return finished


def merge_short(documents: Sequence[Piece], query_ids: Tensor, key_ids: Tensor, query_offset: int = 0) -> list[Piece]:
    """Merge neighbouring documents of one row into pieces of at most MERGED_SIZE x MERGED_SIZE scores.

    For example, documents of 30, 20 and 50 tokens become pieces of 50 tokens each; the first has a mask.
    query_ids, key_ids: document ids [b, s] of the queries and the keys. query_offset: number that is added to a token's
    index in `query_ids` to get its index among the queries.
    """
    pieces: list[Piece] = []
    merged_indices: set[int] = set()  # indices of the pieces that hold several documents
    for piece in documents:
        if pieces and piece.keys.start == pieces[-1].keys.stop:  # its keys follow those of the last piece
            last = pieces[-1]
            queries = slice(last.queries.start, piece.queries.stop)
            keys = slice(last.keys.start, piece.keys.stop)
            if (queries.stop - queries.start) * (keys.stop - keys.start) <= MERGED_SIZE * MERGED_SIZE:
                merged_indices.add(len(pieces) - 1)
                pieces[-1] = piece._replace(queries=queries, keys=keys)
                continue
        pieces.append(piece)

    # Now that no piece grows any more, build the masks that separate the documents of a merged piece.
    for i in merged_indices:
        piece = pieces[i]
        row = piece.row.start
        # `query_ids` numbers the tokens of the whole sequence, unlike piece.queries.
        queries = slice(piece.queries.start - query_offset, piece.queries.stop - query_offset)
        mask = query_ids[row, queries, None] == key_ids[row, None, piece.keys]
        if piece.causal:
            mask = mask.tril()
        pieces[i] = piece._replace(mask=mask[None, None], causal=False)
    return pieces


def document_spans(ids: Tensor) -> dict[int, tuple[int, int]] | None:
    """Return {document id: (begin, end) of its tokens} for ids [s] of one row; None if an id has several ranges."""
    # Ids [1, 1, 2, 0] have the bounds [0, 2, 3, 4] and give {1: (0, 2), 2: (2, 3), 0: (3, 4)}. For ids [1, 2, 1], the
    # dict would have only 2 of the 3 ranges.
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    bounds = [0, *counts.cumsum(0).tolist()]
    spans = dict(zip(values.tolist(), pairwise(bounds), strict=True))
    return spans if len(spans) == len(values) else None

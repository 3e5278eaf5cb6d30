"""Causal attention with context parallelism: from this rank's two slices of a sequence to all tokens before them.

All context ranks gather keys and values. With grouped heads these are a small part of a layer, so gathering
costs little and works for any number of heads (Grattafiori et al. 2024).
On a CPU each slice is computed in pieces, document by document as in `document_attention.py`: the keys before
the slice, which all its queries see, and the slice itself. The pieces of one query are combined by their
log-sum-exps (Milakov and Gimelshein 2018). The backward pass of a piece needs only the combined result. On a
CPU the gathered keys and values are not saved but gathered again.

Shapes: s whole sequence, c context ranks, b batch, n query heads and g key-value heads of this rank, d width
of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron import mpu
from megatron._torch import flash_on_cpu, flash_on_cpu_backward, has_flash_on_cpu

from .chunks import Chunk, Pair, group_short, runs
from .document_attention import laid_out, parts
from .masks import Documents, added_mask, cached_on


class Views(NamedTuple):
    """Visibility for this rank's queries: earlier tokens, within the window, of the same document.

    ids: document number of each token of the sequence, int [b, s]; if `apart` is False, only its device is
    used.
    apart: whether attention is restricted to documents.
    window: number of last tokens that a query sees, None for all.
    stretches: begin and end of each slice.
    """

    ids: Tensor
    apart: bool
    window: int | None
    stretches: tuple[tuple[int, int], ...]
    axis: mpu.Axis

    @property
    def each(self) -> int:
        """Number of tokens of a slice."""
        begin, end = self.stretches[0]
        return end - begin

    @property
    def masked(self) -> bool:
        """True if a window or documents hide some token before a query."""
        return self.apart or self.window is not None

    def keys(self, at: int) -> tuple[int, int]:
        """Return begin and end of the keys that some query of slice number `at` may see."""
        begin, end = self.stretches[at]
        return 0 if self.window is None else max(begin - self.window + 1, 0), end

    def mask(self, at: int) -> Tensor | None:
        """Return the mask of slice number `at`, bool [1 or b, 1, q, k], or None.

        It is True where a query may attend to one of `keys(at)`. It is None if causality alone decides.
        Layers that receive the same ids share the mask.
        """
        if not self.masked:
            return None
        key = "view", self.stretches[at], self.window, self.apart
        return cached_on(self.ids, key, None, lambda: self._mask(at))

    def _mask(self, at: int) -> Tensor:
        (begin, end), (first, _) = self.stretches[at], self.keys(at)
        place = torch.arange(first, end, device=self.ids.device)
        queries = place[begin - first :, None]
        seen = place <= queries
        if self.window is not None:
            seen = seen & (queries - place < self.window)
        if self.apart:
            seen = seen & (self.ids[:, begin:end, None] == self.ids[:, None, first:end])
        return seen[None, None] if seen.dim() == 2 else seen[:, None]


def views_of(ids: Tensor, length: int, window: int | None, documents: Documents | None, axis: mpu.Axis) -> Views:
    """Return the visibility for this rank of `axis` in a sequence of `length` tokens.

    documents: built from the ids [b, s], None if attention is not restricted to documents.
    """
    near = window if window is not None and window < length else None
    return Views(ids, documents is not None, near, tuple(mpu.stretches(length, axis)), axis)


def gather_keys_and_values(key: Tensor, value: Tensor, axis: mpu.Axis) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, [b, g, s/c, d] -> [b, g, s, d] each, in order; the backward pass sums gradients."""
    return _apart(mpu.gather_context(_together(key, value), axis))


def _together(key: Tensor, value: Tensor) -> Tensor:
    """Concatenate keys and values, [b, g, s, d] each, to [s, b, g, 2 d], so that they take one message."""
    return torch.cat([key, value], -1).permute(2, 0, 1, 3).contiguous()


def _apart(both: Tensor) -> tuple[Tensor, Tensor]:
    key, value = both.permute(1, 2, 0, 3).chunk(2, -1)
    return key, value


# ------------------------------------------------------------------------------------------ in pieces, on a CPU


class Piece(NamedTuple):
    """One kernel call: queries (numbered within this rank), keys (numbered within the sequence) and a mask.

    causal: whether the kernel applies a causal mask, in place of an explicit one.
    more: an earlier piece has the same queries, so the results are combined.
    """

    chunk: Chunk
    causal: bool
    more: bool


def pieces_for(query: Tensor, views: Views) -> tuple[Piece, ...] | None:
    """Return the pieces by which to compute query [b, n, s/c, d]; None if masks are faster or required."""
    if query.device.type != "cpu" or torch.compiler.is_compiling() or not has_flash_on_cpu():
        return None
    if views.window is not None:
        return None
    key = "pieces", views.stretches, views.apart, len(query)
    return cached_on(views.ids, key, None, lambda: _find(views, len(query)))


def _find(views: Views, rows: int) -> tuple[Piece, ...] | None:
    found: list[Piece] = []
    if not views.apart:
        for at, (begin, end) in enumerate(views.stretches):
            found += _stretch(slice(0, rows), at * views.each - begin, begin, end, 0)
        return tuple(found)
    for row in range(rows):
        documents = runs(views.ids[row])
        if documents is None:
            return None
        for at, (begin, end) in enumerate(views.stretches):
            found += _documents(views, row, at * views.each - begin, begin, end, sorted(documents.values()))
    return tuple(found)


def _stretch(row: slice, shift: int, begin: int, end: int, first: int) -> list[Piece]:
    """Return the pieces of queries `begin` to `end`, which see all keys from `first` on.

    shift: added to a token's index in the sequence, gives its index on this rank.
    """
    queries = slice(begin + shift, end + shift)
    own = Piece(Chunk(row, queries, slice(begin, end), None), causal=True, more=False)
    before = Piece(Chunk(row, queries, slice(first, begin), None), causal=False, more=True)
    return [own, before] if first < begin else [own]


def _documents(
    views: Views, row: int, shift: int, begin: int, end: int, documents: list[tuple[int, int]]
) -> list[Piece]:
    """Return the pieces of one slice of one row.

    A document that begins before the slice is cut by it; tiny documents share a piece.
    """
    found: list[Piece] = []
    here = [(max(first, begin), min(last, end), first) for first, last in documents if first < end and last > begin]
    if here[0][2] < begin:
        cut = here.pop(0)
        found += _stretch(slice(row, row + 1), shift, *cut)
    for group in group_short([Pair((first + shift, last + shift), (first, last)) for first, last, _ in here]):
        queries, keys = (slice(first[0], last[1]) for first, last in zip(group[0], group[-1], strict=True))
        ids = views.ids[row, keys]
        mask = (ids[:, None] == ids).tril()[None, None] if len(group) > 1 else None
        found.append(Piece(Chunk(slice(row, row + 1), queries, keys, mask), causal=mask is None, more=False))
    return found


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Piece, ...], axis: mpu.Axis, scale: float
) -> Tensor:
    """Attend from this rank's query [b, n, s/c, d] to all ranks' keys and values -> [b, n, s/c, d].

    key, value: this rank's, [b, g, s/c, d]. Forward and backward pass are both collectives of `axis`.
    """
    return _ContextAttention.apply(query, key, value, pieces, axis, scale)  # type: ignore[no-untyped-call,no-any-return]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Piece, ...], axis: mpu.Axis, scale: float
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, sums = laid_out(query), query.new_empty(query.shape[:3], dtype=wide)
        of_all = _for_queries(query, *_gathered(key, value, axis))
        for piece in pieces:
            q, k, v = parts(piece.chunk, query, *of_all)
            here, there = parts(piece.chunk, out)[0], parts(piece.chunk, sums)[0]
            of_here, of_there = flash_on_cpu(q, k, v, _added(piece, q), piece.causal, scale)
            if piece.more:
                both = torch.logaddexp(there, of_there)
                before, now = ((x - both).exp_().unsqueeze(-1) for x in (there, of_there))
                of_here, of_there = here * before + of_here * now, both
            here.copy_(of_here)
            there.copy_(of_there)
        ctx.pieces, ctx.axis, ctx.scale = pieces, axis, scale
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, sums = ctx.saved_tensors
        key, value = _gathered(key, value, ctx.axis)
        groups = key.shape[1]
        of_all = _for_queries(query, key, value)
        of_query, of_key, of_value = (x.zero_() for x in (laid_out(query), *map(laid_out, of_all)))
        for piece in ctx.pieces:
            q, k, v = parts(piece.chunk, query, *of_all)
            g, o, s = (parts(piece.chunk, x)[0] for x in (grad, out, sums))
            found = flash_on_cpu_backward(g, q, k, v, o, s, _added(piece, q), piece.causal, ctx.scale)
            for place, part in zip(parts(piece.chunk, of_query, of_key, of_value), found, strict=True):
                place.add_(part)
        summed = (x.view(len(x), groups, -1, *x.shape[2:]).sum(2) for x in (of_key, of_value))
        return of_query, *_apart(mpu.sum_to_own_context(_together(*summed), ctx.axis)), None, None, None


def _gathered(key: Tensor, value: Tensor, axis: mpu.Axis) -> tuple[Tensor, Tensor]:
    return _apart(mpu.whole_context(_together(key, value), axis))


def _for_queries(query: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Repeat [b, g, s, d] to [b, n, s, d], once per head of query [b, n, q, d], as the kernel requires."""
    each = query.shape[1] // heads[0].shape[1]
    return heads if each == 1 else tuple(x.repeat_interleave(each, dim=1) for x in heads)


def _added(piece: Piece, like: Tensor) -> Tensor | None:
    return None if piece.chunk.mask is None else added_mask(piece.chunk.mask, like.dtype)

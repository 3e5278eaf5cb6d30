"""Span masking as in T5 (Raffel et al. 2020).

The length of a window is chosen so that the masked window fills encoder and decoder.
Shapes: l is the number of tokens of a window.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .indexed_dataset import DatasetError

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Ids = Ints


class SpanPlan(NamedTuple):
    """Numbers of tokens and spans in a sample.

    tokens: text tokens of the window. noise: masked tokens. spans: number of spans. encoder, decoder: tokens of the
    encoder and of the decoder. room: largest number of spans in a window in which more than `spans` documents end (see
    short_documents.py); 0 means that no window has more than `spans` spans.
    """

    tokens: int
    noise: int
    spans: int
    encoder: int
    decoder: int
    room: int = 0


def _plan(tokens: int, density: float, mean_span: float, encoder_ends: bool) -> SpanPlan:
    noise = min(max(round(tokens * density), 1), tokens - 1)
    spans = min(max(round(noise / mean_span), 1), noise, tokens - noise)
    # Convention t5: encoder input and labels end with an end token, and a start token shifts the decoder input.
    # Convention cpm: a closing sentinel ends the labels, and the decoder input starts with the first sentinel.
    return SpanPlan(tokens, noise, spans, tokens - noise + spans + encoder_ends, noise + spans + encoder_ends)


def plan_spans(
    encoder: int, decoder: int | None, density: float, mean_span: float, sentinels: int, encoder_ends: bool
) -> SpanPlan:
    """Return the plan with the longest window that fits into `encoder` encoder tokens and `decoder` decoder tokens.

    decoder: None for no limit. encoder_ends: True if encoder input and labels end with an end token (convention t5).
    Raises DatasetError if there are too few sentinels.
    """
    tokens = 2
    best = _plan(tokens, density, mean_span, encoder_ends)
    while True:
        tokens += 1
        plan = _plan(tokens, density, mean_span, encoder_ends)
        if plan.encoder > encoder or (decoder is not None and plan.decoder > decoder):
            break
        best = plan
    needed = best.spans + (not encoder_ends)  # convention cpm needs one more sentinel, which closes the labels
    if needed > sentinels:
        raise DatasetError(
            f"a sample of {encoder} encoder tokens has {best.spans} masked spans and needs {needed} sentinels; raise "
            f"--num-sentinels (now {sentinels}) or --mean-span-length (now {mean_span:g}), or lower --noise-density "
            f"(now {density:g})"
        )
    return best


def compose(rng: np.random.Generator, total: int, parts: int) -> Ints:
    """Draw `parts` positive lengths whose sum is `total`; all such sequences are equally likely."""
    cuts = np.empty(parts + 1, dtype=np.int64)
    cuts[0] = 0
    cuts[-1] = total
    cuts[1:-1] = rng.permutation(total - 1)[: parts - 1] + 1
    cuts.sort()
    return cuts[1:] - cuts[:-1]


def draw_spans(rng: np.random.Generator, plan: SpanPlan) -> tuple[Mask, Mask]:
    """Draw spans; return (mask of tokens in spans [l], mask of first tokens of spans [l]).

    The first token of the window is never masked.
    """
    lengths = np.empty(2 * plan.spans, dtype=np.int64)
    lengths[0::2] = compose(rng, plan.tokens - plan.noise, plan.spans)
    lengths[1::2] = compose(rng, plan.noise, plan.spans)
    ends = lengths.cumsum()
    turns = np.zeros(plan.tokens, dtype=np.int8)
    turns[ends[:-1]] = 1
    masked = np.bitwise_xor.accumulate(turns).view(np.bool_)
    first = np.zeros(plan.tokens, dtype=np.bool_)
    first[ends[0::2]] = True
    return masked, first


def draw_spans_to_document_ends(rng: np.random.Generator, plan: SpanPlan, ends: Mask) -> tuple[Mask, Mask, int]:
    """Draw spans for convention cpm, in which the last token of each document is the last token of a span.

    ends: mask of the last tokens of documents [l].
    Returns (mask of tokens in spans [l], mask of first tokens of spans [l], n). The sample consists of the first n
    tokens of the window. n is less than l in two cases: more than max(plan.spans, plan.room) documents end in the
    window; or the documents are so short that fewer than plan.noise tokens can be masked, and the unmasked tokens do
    not all fit into the encoder.
    """
    boundaries = np.flatnonzero(ends)
    used = plan.tokens
    most = max(plan.spans, plan.room)
    if len(boundaries) > most:
        boundaries = boundaries[:most]
        used = int(boundaries[-1]) + 1
    while True:
        stops = boundaries + 1 if len(boundaries) and boundaries[-1] == used - 1 else np.append(boundaries + 1, used)
        sizes = np.diff(stops, prepend=0)
        must = np.ones(len(sizes), dtype=np.int64)
        if len(stops) > len(boundaries):
            must[-1] = 0  # the last document continues beyond the window, so it needs no span at its end
        spans = _distribute(sizes // 2, min(max(plan.spans, len(boundaries)), used), must)
        noise = _distribute(np.where(spans > 0, np.maximum(sizes - spans, spans), 0), plan.noise, spans)
        excess = used - int(noise.sum()) + int(spans.sum()) - plan.encoder
        if excess <= 0:
            break
        used -= excess
        boundaries = boundaries[boundaries < used]
    masked = np.zeros(plan.tokens, dtype=np.bool_)
    first = np.zeros(plan.tokens, dtype=np.bool_)
    begin = 0
    for size, count, hidden, ended in zip(sizes, spans, noise, must, strict=True):
        _fill(rng, masked[begin : begin + size], first[begin : begin + size], int(count), int(hidden), bool(ended))
        begin += size
    return masked, first, used


def _distribute(room: Ints, total: int, least: Ints) -> Ints:
    """Divide at most `total` into parts in proportion to `room`, and return the sizes of the parts.

    The size of part i is from least[i] to max(room[i], least[i]).
    """
    room = np.maximum(room, least)
    left = max(min(total, int(room.sum())) - int(least.sum()), 0)
    free = room - least
    given = least + free * left // max(int(free.sum()), 1)
    short = min(total, int(room.sum())) - int(given.sum())
    for place in np.argsort(-(room - given), kind="stable")[: max(short, 0)]:
        given[place] += given[place] < room[place]
    return given


def _fill(rng: np.random.Generator, masked: Mask, first: Mask, spans: int, noise: int, ended: bool) -> None:
    """Draw `spans` spans with `noise` tokens in total in one document, and set them in `masked` and `first`.

    ended: True if the last span must end at the last token of the document.
    """
    if not spans:
        return
    # Number of unmasked tokens. At least one precedes each span, except in a document of one token.
    kept = len(masked) - noise
    kept_lengths = np.zeros(spans + 1, dtype=np.int64)
    if kept > spans and not ended:
        kept_lengths[:] = compose(rng, kept, spans + 1)
    elif kept:
        kept_lengths[:spans] = compose(rng, kept, spans)
    lengths = compose(rng, noise, spans)
    starts = np.cumsum(kept_lengths[:spans]) + np.cumsum(lengths) - lengths
    first[starts] = True
    for start, length in zip(starts, lengths, strict=True):
        masked[start : start + length] = True


def splice(text: Ids, masked: Mask, first: Mask, sentinels: Ids) -> tuple[Ids, Ids, Ids]:
    """Split a text into encoder tokens and decoder tokens; return (encoder tokens, decoder tokens, positions).

    The encoder tokens are the text with a sentinel in place of each span. The decoder tokens are the spans, each
    preceded by its sentinel. The positions are those of the sentinels in the decoder tokens.
    """
    kept = text.copy()
    kept[first] = sentinels
    repeats = 1 + first[masked]
    spans = np.repeat(text[masked], repeats)
    at: Ids = (np.cumsum(repeats) - repeats)[first[masked]]
    spans[at] = sentinels
    return kept[~masked | first], spans, at

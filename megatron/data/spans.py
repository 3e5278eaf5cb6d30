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
    encoder and of the decoder. max_spans: largest number of spans in a window in which more than `spans` documents end
    (see short_documents.py); 0 means that no window has more than `spans` spans.
    """

    tokens: int
    noise: int
    spans: int
    encoder: int
    decoder: int
    max_spans: int = 0


def count_noise_and_spans(tokens: int, density: float, mean_span: float, max_noise: int) -> tuple[int, int]:
    """Return the numbers of masked tokens, from 1 to `max_noise`, and of their spans."""
    noise = min(max(round(tokens * density), 1), max_noise)
    # A span has at least one masked token, and an unmasked one before it if possible.
    spans = min(max(round(noise / mean_span), 1), noise, max(tokens - noise, 1))
    return noise, spans


def _plan(tokens: int, density: float, mean_span: float, encoder_ends: bool) -> SpanPlan:
    """Return a plan for windows of `tokens` tokens. density: share of tokens to mask, in spans of a mean length."""
    noise, spans = count_noise_and_spans(tokens, density, mean_span, max_noise=tokens - 1)
    # Convention t5: encoder input and labels end with an end token, and a start token shifts the decoder input.
    # Convention cpm: a closing sentinel ends the labels, and the decoder input starts with the first sentinel.
    # So both have one token more in convention t5 (encoder_ends is True and counts as 1).
    encoder_length = tokens - noise + spans + encoder_ends
    decoder_length = noise + spans + encoder_ends
    return SpanPlan(tokens, noise, spans, encoder_length, decoder_length)


def plan_spans(
    encoder: int, decoder: int | None, density: float, mean_span: float, sentinels: int, encoder_ends: bool
) -> SpanPlan:
    """Return the plan with the longest window that fits into `encoder` encoder tokens and `decoder` decoder tokens.

    decoder: None for no limit. encoder_ends: True if encoder input and labels end with an end token (convention t5).
    Raises DatasetError if there are too few sentinels.
    """
    best = _plan(2, density, mean_span, encoder_ends)  # the shortest window: a masked and an unmasked token
    while True:
        plan = _plan(best.tokens + 1, density, mean_span, encoder_ends)
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


def draw_lengths(rng: np.random.Generator, total: int, parts: int) -> Ints:
    """Draw `parts` positive lengths whose sum is `total`; all such sequences are equally likely."""
    # Cuts at two different numbers from 1 to 9, such as 2 and 7, divide 10 into lengths 2, 5 and 3.
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
    lengths[0::2] = draw_lengths(rng, plan.tokens - plan.noise, plan.spans)
    lengths[1::2] = draw_lengths(rng, plan.noise, plan.spans)
    ends = lengths.cumsum()
    # Unmasked and masked lengths alternate, so each end toggles the mask: toggles 0 0 1 0 1 0 give 0 0 1 1 0 0.
    toggles = np.zeros(plan.tokens, dtype=np.int8)
    toggles[ends[:-1]] = 1
    is_masked = np.bitwise_xor.accumulate(toggles).view(np.bool_)  # 1 after an odd number of toggles
    is_span_start = np.zeros(plan.tokens, dtype=np.bool_)
    is_span_start[ends[0::2]] = True
    return is_masked, is_span_start


def draw_spans_to_document_ends(
    rng: np.random.Generator, plan: SpanPlan, is_document_end: Mask
) -> tuple[Mask, Mask, int]:
    """Draw spans for convention cpm, in which the last token of each document is the last token of a span.

    is_document_end: mask of the last tokens of documents [l].
    Returns (mask of tokens in spans [l], mask of first tokens of spans [l], n). The sample consists of the first n
    tokens of the window. n is less than l in two cases: more than max(plan.spans, plan.max_spans) documents end in the
    window; or the documents are so short that fewer than plan.noise tokens can be masked, and the unmasked tokens do
    not all fit into the encoder.
    """
    boundaries = np.flatnonzero(is_document_end)
    used = plan.tokens
    max_spans = max(plan.spans, plan.max_spans)
    if len(boundaries) > max_spans:  # the sample ends with the last document that can have a span
        boundaries = boundaries[:max_spans]
        used = int(boundaries[-1]) + 1
    # Use fewer tokens of the window, until the unmasked tokens and the sentinels fit into the encoder.
    while True:
        sizes, min_spans, spans, noise = _divide_among_documents(boundaries, used, plan)
        encoder_length = used - noise.sum() + spans.sum()  # a sentinel takes the place of each span
        excess = encoder_length - plan.encoder
        if excess <= 0:
            break
        used -= excess  # with fewer tokens, the documents divide the spans again
        boundaries = boundaries[boundaries < used]

    is_masked = np.zeros(plan.tokens, dtype=np.bool_)
    is_span_start = np.zeros_like(is_masked)
    begin = 0
    # The smallest number of spans is 1 for a document whose last token must be masked, else 0.
    for size, count, noise_tokens, is_end_masked in zip(sizes, spans, noise, min_spans, strict=True):
        document = slice(begin, begin + size)
        # The slices are views, so this writes into the masks of the window.
        _mask_document(rng, is_masked[document], is_span_start[document], count, noise_tokens, is_end_masked)
        begin += size
    return is_masked, is_span_start, used


def _divide_among_documents(boundaries: Ints, used: int, plan: SpanPlan) -> tuple[Ints, Ints, Ints, Ints]:
    """Divide the spans and masked tokens of `plan` among the documents in the first `used` tokens of a window.

    boundaries: positions of the last tokens of documents.
    Returns for each document (tokens, smallest number of spans, spans, masked tokens). The smallest number of spans is
    1, but 0 for a last document that continues beyond the used tokens, as no span need end there.
    """
    # Last tokens at 3 and 7 and 10 used tokens give the stops 4 8 10 and the sizes 4 4 2; the last document is cut.
    stops = boundaries + 1
    # The last document is cut if tokens follow the last stop, also if there is no stop at all.
    is_cut = not len(stops) or stops[-1] < used
    if is_cut:
        stops = np.append(stops, used)
    sizes = np.diff(stops, prepend=0)
    min_spans = np.ones_like(sizes)
    if is_cut:
        min_spans[-1] = 0

    # Spans are divided in proportion to the size of a document. Each span needs two tokens, a masked one and an
    # unmasked one before it.
    wanted_spans = max(plan.spans, len(boundaries))  # at least one for each document that ends
    spans = _distribute(sizes // 2, min(wanted_spans, used), min_spans)
    # Each span gets at least one masked token. A document with spans keeps an unmasked token for each, if it can.
    most_noise = np.where(spans > 0, np.maximum(sizes - spans, spans), 0)
    noise = _distribute(most_noise, plan.noise, spans)
    return sizes, min_spans, spans, noise


def _distribute(capacity: Ints, total: int, least: Ints) -> Ints:
    """Divide at most `total` into parts in proportion to `capacity`, and return the sizes of the parts.

    The size of part i is from least[i] to max(capacity[i], least[i]). With capacities 4 and 2, a total of 5 and at
    least 1 in each part, the parts are 3 and 1 after rounding down, and 4 and 1 in the end.
    """
    capacity = np.maximum(capacity, least)
    total = min(total, capacity.sum())
    remaining = max(total - least.sum(), 0)
    spare = capacity - least
    parts: Ints = least + spare * remaining // max(spare.sum(), 1)  # rounded down, so some of `total` is missing
    missing = total - parts.sum()
    # The parts with the most unused capacity get one more.
    for index in np.argsort(-(capacity - parts), kind="stable")[: max(missing, 0)]:
        if parts[index] < capacity[index]:
            parts[index] += 1
    return parts


def _mask_document(
    rng: np.random.Generator, is_masked: Mask, is_span_start: Mask, spans: int, masked_tokens: int, is_end_masked: bool
) -> None:
    """Draw `spans` spans with `masked_tokens` tokens in total in one document, and set them in the two masks.

    is_end_masked: True if the last span must end at the last token of the document.
    """
    if not spans:
        return
    # Number of unmasked tokens. At least one precedes each span, except in a document of one token.
    unmasked = len(is_masked) - masked_tokens
    unmasked_lengths = np.zeros(spans + 1, dtype=np.int64)  # before each span, and after the last one
    if unmasked > spans and not is_end_masked:  # unmasked tokens also follow the last span
        unmasked_lengths[:] = draw_lengths(rng, unmasked, spans + 1)
    elif unmasked:  # else the document is one masked token
        unmasked_lengths[:spans] = draw_lengths(rng, unmasked, spans)
    lengths = draw_lengths(rng, masked_tokens, spans)
    # A span starts after the unmasked tokens up to it and the spans before it. With 2 and 3 unmasked tokens before
    # spans of 1 and 4 tokens, these are 2 5 and 0 1, so the spans start at 2 and 6.
    starts = np.cumsum(unmasked_lengths[:spans]) + np.cumsum(lengths) - lengths
    is_span_start[starts] = True
    for start, length in zip(starts, lengths, strict=True):
        is_masked[start : start + length] = True


def splice(text: Ids, is_masked: Mask, is_span_start: Mask, sentinels: Ids) -> tuple[Ids, Ids, Ids]:
    """Split a text into encoder tokens and decoder tokens; return (encoder tokens, decoder tokens, positions).

    The encoder tokens are the text with a sentinel in place of each span. The decoder tokens are the spans, each
    preceded by its sentinel. The positions are those of the sentinels in the decoder tokens.
    """
    with_sentinels = text.copy()
    with_sentinels[is_span_start] = sentinels
    # The first token of a span is repeated, and its first copy is then replaced by the sentinel. The spans A B and C
    # have the repeats 2 1 2, so the targets are A A B C C, and with sentinels at 0 and 3, <1> A B <2> C.
    starts_span = is_span_start[is_masked]  # whether each masked token is the first one of its span
    repeats = 1 + starts_span
    targets = np.repeat(text[is_masked], repeats)
    sentinel_positions: Ids = (np.cumsum(repeats) - repeats)[starts_span]
    targets[sentinel_positions] = sentinels
    return with_sentinels[~is_masked | is_span_start], targets, sentinel_positions

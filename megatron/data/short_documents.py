"""Window lengths for short documents with the convention `cpm`, in which every document ends with a masked span.

With T5's masking rates, a window has one span for every 20 tokens. If most documents have fewer than 20 tokens, more
documents end in a window than the window has spans. The text after the last span would then be unused; in a corpus of
single lines, this would be most of the text. So this module makes windows shorter and lets a window have more spans:
one for each document that ends in it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .spans import SpanPlan, count_noise_and_spans

SAMPLED_DOCUMENTS = 200_000  # number of documents that suffice to estimate how many documents end in a window
MAX_UNUSED = 1e-3  # windows are shortened if more than this fraction of the text would be unused
Sizes = NDArray[np.integer]


def _document_ends(sizes: Sizes) -> NDArray[np.int64]:
    """Return the positions of document ends in the text of the documents, concatenated in random order.

    From a large corpus, only SAMPLED_DOCUMENTS random documents are taken.
    """
    rng = np.random.default_rng(0)
    chosen = sizes
    if len(sizes) > SAMPLED_DOCUMENTS:
        numbers = rng.choice(len(sizes), SAMPLED_DOCUMENTS, replace=False)
        chosen = sizes[np.sort(numbers)]
    chosen = rng.permutation(chosen[chosen > 0])  # without empty documents
    return np.cumsum(chosen, dtype=np.int64) - 1


def _unused_fraction(ends: NDArray[np.int64], plan: SpanPlan) -> float:
    """Return the fraction of the text that is unused because windows of this plan have too few spans.

    ends: positions of document ends in the concatenated text.
    """
    length = plan.tokens
    windows = int(ends[-1] + 1) // length if len(ends) else 0
    if not windows:
        return 0.0
    begins = np.arange(windows) * length
    # For each window, `first` is the index in `ends` of the first document end in the window. Every document end takes
    # one span; `last` is the index of the document end that takes the last one. Text after this document is unused, if
    # a further document ends in the window. With windows of 6 tokens, 2 spans and ends at 2 4 5 11, window 0 has first
    # 0 and last 1. The next end, 5, lies in it, so the window uses its 5 tokens up to the end at 4. Window 1 has first
    # 3 and last 4, beyond the last end, so it uses all its tokens.
    first = ends.searchsorted(begins)
    last = first + max(plan.spans, plan.max_spans) - 1
    final = len(ends) - 1  # index of the last document end; `np.minimum` keeps the indices in the array
    next_end = ends[np.minimum(last + 1, final)]
    has_unused = (last < final) & (next_end < begins + length)
    used_until = ends[np.minimum(last, final)] + 1
    used = np.where(has_unused, used_until - begins, length)
    return float(1 - used.sum() / (windows * length))


def _max_ends_in_window(ends: NDArray[np.int64], tokens: int) -> int:
    """Return the largest number of document ends in one window of `tokens` tokens.

    With ends at 2, 5 and 7 and windows of 4 tokens, 0, 1 and 3 ends lie before the tokens 0, 4 and 8. So the two
    windows have 1 and 2 ends.
    """
    text_length = int(ends[-1]) + 1 if len(ends) else 0
    windows = max(text_length // tokens, 1)
    boundaries = np.arange(windows + 1) * tokens
    ends_before = ends.searchsorted(boundaries)
    return int(np.diff(ends_before).max())


def _plan_window(tokens: int, max_ends: int, density: float, mean_span: float) -> SpanPlan:
    """Return a plan for windows of `tokens` tokens, in which up to `max_ends` documents end."""
    # 1/8 more, rounded up, because in another order more documents may end in one window.
    max_spans = max_ends + -(-max_ends // 8)
    noise, spans = count_noise_and_spans(tokens, density, mean_span, max_noise=tokens)
    max_spans = min(max(max_spans, spans), tokens)
    masked = max(noise, max_spans)
    # Encoder and decoder have a sentinel for each span, besides the unmasked and the masked tokens.
    encoder_length = tokens - masked + max_spans
    return SpanPlan(tokens, noise, spans, encoder_length, masked + max_spans, max_spans)


def fit_documents(
    plan: SpanPlan, corpora: Sequence[Sizes], density: float, mean_span: float, decoder: int | None, sentinels: int
) -> tuple[SpanPlan, str]:
    """Return (plan, note). If `plan` would leave text unused, the windows of the returned plan are shorter.

    corpora: for each corpus, the number of tokens of each document, [documents]. decoder: largest number of decoder
    tokens, or None for no limit. sentinels: number of sentinels, including the closing sentinel.
    The note describes the change; it is empty if the plan is unchanged.
    """
    ends_of_corpora = list(map(_document_ends, corpora))
    unused = max((_unused_fraction(ends, plan) for ends in ends_of_corpora), default=0.0)
    if unused <= MAX_UNUSED:
        return plan, ""
    tokens = plan.tokens
    while True:  # make the windows shorter by 1/64 until the plan fits
        max_ends = max(_max_ends_in_window(ends, tokens) for ends in ends_of_corpora)
        shorter = _plan_window(tokens, max_ends, density, mean_span)
        fits_decoder = not decoder or shorter.decoder <= decoder
        fits_lengths = shorter.encoder <= plan.encoder and fits_decoder
        has_sentinels = shorter.max_spans < sentinels  # one for each span, and the closing sentinel
        if tokens <= 2 or (fits_lengths and has_sentinels):
            break
        tokens -= max(tokens // 64, 1)

    # Too few sentinels even for windows of 2 tokens: the text after the last span that has one is unused.
    shorter = shorter._replace(max_spans=min(shorter.max_spans, sentinels - 1))
    still_unused = max(_unused_fraction(ends, shorter) for ends in ends_of_corpora)
    # The note names the mean of the corpus with the shortest documents.
    mean = min(float(np.mean(sizes)) for sizes in corpora)
    note = (
        f"documents are short ({mean:.0f} tokens) and each ends with a masked span, so samples have {shorter.tokens} "
        f"tokens of text with room for {shorter.max_spans} spans; {plan.tokens} tokens with {plan.spans} spans would "
        f"drop {unused:.0%} of the text"
    )
    if still_unused > MAX_UNUSED:
        note += f"; {still_unused:.1%} of the text is still dropped"
    return shorter, note + _advice_for_longer(shorter, plan, decoder, sentinels)


def _advice_for_longer(shorter: SpanPlan, plan: SpanPlan, decoder: int | None, sentinels: int) -> str:
    """Return a hint that names the flag to raise for longer windows, or an empty string."""
    if shorter.encoder > 0.95 * plan.encoder:  # the encoder is nearly full, so no other flag would help
        return ""
    # So a longer window did not fit because of the sentinels or the decoder. If 1/16 more spans, at least 2, would need
    # more sentinels than there are, the sentinels are the limit.
    if shorter.max_spans + max(shorter.max_spans // 16, 2) >= sentinels:
        return f" (longer samples need more than --num-sentinels {sentinels})"
    return f" (longer samples need more than --dec-seq-length {decoder})" if decoder else ""

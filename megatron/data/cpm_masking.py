"""Masking of spans of a document for T5 during preprocessing, in the corpus format of CPM-2 (see cpm_triples.py).

This module imports only numpy, so that many worker processes start fast.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .spans import SpanPlan, count_noise_and_spans, draw_spans_to_document_ends, splice

Ids = NDArray[np.int64]


def mask_document(
    ids: NDArray[np.integer], first_id: int, density: float, mean_span: float, seed: Sequence[int]
) -> tuple[Ids, Ids, Ids]:
    """Mask spans of a document that ends with <eod>; return (context, target, offsets).

    context: the document with a sentinel in place of each span. target: the spans, each preceded by its sentinel.
    offsets: two numbers for each span: the position of its sentinel in the target, and its length including the
    sentinel.

    first_id: id of the first sentinel, equal to the size of the text vocabulary. density: fraction of masked
    tokens. mean_span: mean length of a span in tokens. seed: determines which tokens are masked.
    """
    text = ids.astype(np.int64)
    size = len(text)
    noise, spans = count_noise_and_spans(size, density, mean_span, max_noise=size)
    is_document_end = np.arange(size) == size - 1
    rng = np.random.default_rng(list(seed))
    # This encoder length is large enough for any mask; the decoder length has no effect here.
    plan = SpanPlan(size, noise, spans, encoder=2 * size, decoder=0)
    masked, is_span_start, _ = draw_spans_to_document_ends(rng, plan, is_document_end)
    sentinels = first_id + np.arange(is_span_start.sum())
    context, target, positions = splice(text, masked, is_span_start, sentinels)
    lengths = np.diff(positions, append=len(target))
    # The offsets are position, length, position, length and so on.
    offsets = np.stack([positions, lengths], axis=1).ravel()
    return context, target, offsets

"""Fill-in-the-middle (Bavarian et al. 2022): a text with its middle moved to its end, so that a left-to-right model learns to fill gaps.

    text    A B C D E F G H <eod>
    PSM     <prefix> A B <suffix> G H <middle> C D E F <eod>
    SPM     <prefix> <suffix> G H <middle> A B C D E F <eod>

A document keeps its length: the last three tokens of its text in a window give way to the three marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
MARKS = 3


@dataclass(frozen=True)
class Gaps:
    """How often documents are rearranged, and what marks the pieces.

    rate: share of the documents of a window. spm_rate: of these, share in the order suffix, prefix, middle. prefix, middle, suffix: ids of
    the marks. eod: the end of a document, which stays its last token.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    eod: int

    def window(self, text: Ids, sizes: Sequence[int], seed: Sequence[int]) -> Ids:
        """The tokens [s] of a window, whose documents have `sizes` of them, in their new order; a pure function of these and the seed."""
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        chances = rng.random((len(sizes), 4))
        ends = np.cumsum(sizes).tolist()
        pieces = [
            self.document(text[end - size : end], bool(one < self.rate), bool(spm < self.spm_rate), (first, second))
            for size, end, (one, spm, first, second) in zip(sizes, ends, chances.tolist(), strict=True)
        ]
        return np.concatenate(pieces)

    def document(self, ids: Ids, rearranged: bool, spm: bool, cuts: tuple[float, float]) -> Ids:
        """ids [n] -> [n]. cuts: where the middle begins and ends, as shares from 0 to 1 in any order. A text of three tokens or fewer stays."""
        closed = bool(len(ids)) and ids[-1] == self.eod
        text = ids[: len(ids) - closed]
        kept = len(text) - MARKS
        if not rearranged or kept < 1:
            return ids
        begin, end = sorted(int(cut * (kept + 1)) for cut in cuts)
        prefix, middle, suffix = text[:begin], text[begin:end], text[end:kept]
        order: list[Ids | list[int]] = [[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle]
        if spm:
            order = [[self.prefix], [self.suffix], suffix, [self.middle], prefix, middle]
        return np.concatenate([*order, ids[len(text) :]]).astype(np.int64)

"""Fill-in-the-middle (Bavarian et al. 2022): moves the middle of a document to its end.

So a left-to-right model learns to infill.

    text    A B C D E F G H I J K <eod>
    PSM     <prefix> A B <suffix> G H <middle> C D E F <eod>
    SPM     <prefix> <suffix> G H <middle> A B C D E F <eod>

A document keeps its length: the three special tokens take the place of the last three tokens of its text (I J K).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
SPECIAL_TOKENS = 3


@dataclass(frozen=True)
class FillInTheMiddle:
    """Fill-in-the-middle settings: rates and special tokens.

    rate: probability that a document is rearranged. spm_rate: probability that a rearranged document has SPM order
    (suffix, prefix, middle) instead of PSM order (prefix, suffix, middle).
    prefix, middle, suffix: ids of the special tokens. eod: end-of-document id, which stays last.
    """

    rate: float
    spm_rate: float
    prefix: int
    middle: int
    suffix: int
    eod: int

    def rearrange_window(self, text: Ids, sizes: Sequence[int], seed: Sequence[int]) -> Ids:
        """Rearrange randomly chosen documents of a window, text [s] -> [s].

        sizes: number of tokens of each document in the window. seed: determines the choice and the cuts.
        """
        rng = np.random.Generator(np.random.Philox(seed))
        # These four numbers are drawn for every document, rearranged or not, so that each choice is independent.
        chances = rng.random((len(sizes), 4))
        pieces = []
        begin = 0  # of the document in the window
        for size, (chance, spm_chance, first_cut, second_cut) in zip(sizes, chances.tolist(), strict=True):
            document = text[begin : begin + size]
            is_rearranged = chance < self.rate
            is_spm = spm_chance < self.spm_rate
            pieces.append(self.rearrange_document(document, is_rearranged, is_spm, (first_cut, second_cut)))
            begin += size
        return np.concatenate(pieces)

    def rearrange_document(self, ids: Ids, is_rearranged: bool, is_spm: bool, cuts: tuple[float, float]) -> Ids:
        """Rearrange one document, ids [n] -> [n]; a document of at most three text tokens stays unchanged.

        cuts: start and end of the middle as fractions of the document from 0 to 1, in any order.
        """
        has_eod = bool(len(ids)) and ids[-1] == self.eod
        text = ids[:-1] if has_eod else ids
        kept_tokens = len(text) - SPECIAL_TOKENS  # the special tokens take the place of the last tokens
        if not is_rearranged or kept_tokens < 1:
            return ids
        # + 1, because there are 4 places to cut in 3 tokens: before, between and after them.
        begin = int(min(cuts) * (kept_tokens + 1))
        end = int(max(cuts) * (kept_tokens + 1))
        prefix = text[:begin]
        middle = text[begin:end]
        suffix = text[end:kept_tokens]
        order: list[Ids | list[int]] = [[self.prefix], prefix, [self.suffix], suffix, [self.middle], middle]
        if is_spm:
            order = [[self.prefix], [self.suffix], suffix, [self.middle], prefix, middle]
        return np.concatenate([*order, ids[len(text) :]]).astype(np.int64)  # the last entry is <eod>, or empty

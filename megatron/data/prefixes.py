"""Prefix lengths for prefix LM (Raffel et al. 2020).

Tokens of a prefix attend bidirectionally and are not trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prefixes:
    """Prefix settings. eod: end-of-document id. by_document: one prefix per document instead of one per window."""

    eod: int
    by_document: bool

    def of(self, tokens: Ids, seed: Sequence[int]) -> Ids:
        """Return 1 for tokens in prefixes, else 0, tokens [s] -> [s]; a pure function of tokens and seed.

        Prefix lengths are uniform from 0 to the length of the document or window minus 1, so at least one token
        is trained on.
        """
        ends = np.flatnonzero(tokens[:-1] == self.eod) + 1 if self.by_document else np.empty(0, np.int64)
        stops = np.concatenate([[0], ends, [len(tokens)]])
        sizes = np.diff(stops)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        lengths = (rng.random(len(sizes)) * sizes).astype(np.int64)
        place = np.arange(len(tokens)) - np.repeat(stops[:-1], sizes)
        inside: Ids = (place < np.repeat(lengths, sizes)).astype(np.int64)
        return inside

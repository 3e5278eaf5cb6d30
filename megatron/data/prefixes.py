"""How much of a text is a prefix, whose tokens look at each other both ways, and of which nothing is learned (Raffel et al. 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prefixes:
    """eod: the end of a document. by_document: each document has a prefix of its own, not the whole window one."""

    eod: int
    by_document: bool

    def of(self, tokens: Ids, seed: Sequence[int]) -> Ids:
        """tokens [s] -> [s] 1 in prefixes, else 0; a pure function of these and the seed.

        A prefix has from no token to all but one of its document or window, each number with the same chance, so that something is learned.
        """
        ends = np.flatnonzero(tokens[:-1] == self.eod) + 1 if self.by_document else np.empty(0, np.int64)
        borders = np.concatenate([[0], ends, [len(tokens)]])
        sizes = np.diff(borders)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        lengths = (rng.random(len(sizes)) * sizes).astype(np.int64)
        place = np.arange(len(tokens)) - np.repeat(borders[:-1], sizes)
        inside: Ids = (place < np.repeat(lengths, sizes)).astype(np.int64)
        return inside

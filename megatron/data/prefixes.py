"""Random prefixes for prefix-LM training (Raffel et al. 2020).

Tokens of a prefix attend to each other bidirectionally and do not count in the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prefixes:
    """Settings of prefix-LM training.

    eod: end-of-document id. by_document: True for one prefix per document, False for one prefix per window.
    """

    eod: int
    by_document: bool

    def draw_mask(self, tokens: Ids, seed: Sequence[int]) -> Ids:
        """Return a mask with 1 for tokens of a prefix and 0 for other tokens, tokens [s] -> [s].

        The length of a prefix is uniform from 0 to n - 1, where n is the length of the document or window. So at
        least one token counts in the loss. The same tokens and seed give the same mask.
        """
        ends = np.empty(0, np.int64)
        if self.by_document:
            ends = np.flatnonzero(tokens[:-1] == self.eod) + 1
        # Documents of 3 and 2 tokens: bounds 0 3 5, sizes 3 2, position 0 1 2 0 1. Lengths of 2 and 0 give 1 1 0 0 0.
        bounds = np.concatenate([[0], ends, [len(tokens)]])
        sizes = np.diff(bounds)
        rng = np.random.Generator(np.random.Philox(seed))
        lengths = (rng.random(len(sizes)) * sizes).astype(np.int64)
        position = np.arange(len(tokens)) - np.repeat(bounds[:-1], sizes)
        is_inside = position < np.repeat(lengths, sizes)
        mask: Ids = is_inside.astype(np.int64)
        return mask

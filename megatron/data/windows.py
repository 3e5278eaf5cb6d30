"""The text behind a sample: a window of documents laid end to end, in the order of sample_order.py."""

import numpy as np
from numpy.typing import NDArray

from .indexed_dataset import IndexedDataset
from .sample_order import SampleOrder


class Windows:
    """Windows of `length` + `overlap` tokens over some documents of a corpus. Raises ValueError if they do not fill one."""

    def __init__(
        self, indexed: IndexedDataset, documents: range, length: int, seed: int, stream: str, overlap: int = 1
    ) -> None:
        self._tokens, self._first = indexed.tokens, documents.start
        ends = np.concatenate([[0], indexed.document_ends()])
        self._starts: NDArray[np.int64] = ends[:-1]
        self.order = SampleOrder(np.diff(ends)[documents.start : documents.stop], length, seed, stream, overlap)

    def read(self, n: int) -> tuple[NDArray[np.int64], list[int]]:
        """(tokens of window n, how many of them each of its documents has)."""
        text = np.empty(self.order.length + self.order.overlap, dtype=np.int64)
        at, sizes = 0, []
        for document, start, end in self.order.stretches(n):
            base = int(self._starts[self._first + document])
            text[at : at + end - start] = self._tokens[base + start : base + end]
            at += end - start
            sizes.append(end - start)
        return text, sizes

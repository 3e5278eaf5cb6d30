"""The text behind a sample: a window of documents laid end to end, in the order of sample_order.py."""

import numpy as np
from numpy.typing import NDArray

from .indexed_dataset import DatasetError, IndexedDataset
from .sample_order import SampleOrder


class Windows:
    """Windows of `length` + `overlap` tokens over some documents of a corpus. Raises ValueError if they do not fill one.

    vocab_size: a window with an id outside of it raises DatasetError when it is read.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        length: int,
        seed: int,
        stream: str,
        overlap: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        self._indexed, self._first, self._vocab_size = indexed, documents.start, vocab_size
        self.order = SampleOrder(indexed.document_sizes(documents), length, seed, stream, overlap)

    def read(self, n: int) -> tuple[NDArray[np.int64], list[int]]:
        """(tokens of window n, how many of them each of its documents has)."""
        indexed = self._indexed
        text = np.empty(self.order.length + self.order.overlap, dtype=np.int64)
        at, sizes = 0, []
        for document, start, end in self.order.stretches(n):
            text[at : at + end - start] = indexed.document(self._first + document, start, end)
            at += end - start
            sizes.append(end - start)
        if self._vocab_size is not None and int(text.view(np.uint64).max()) >= self._vocab_size:
            worst = int(text.max()) if text.max() >= self._vocab_size else int(text.min())
            where = [self._first + s.document for s in self.order.stretches(n)]
            raise DatasetError(
                f"{indexed.prefix}.bin holds token id {worst} in one of the documents {where}, outside the vocabulary of "
                f"{self._vocab_size}: the file is damaged or was made with another tokenizer"
            )
        return text, sizes

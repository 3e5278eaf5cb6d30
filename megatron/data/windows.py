"""Windows of concatenated documents, read in shuffled order (see sample_order.py)."""

import numpy as np
from numpy.typing import NDArray

from .indexed_dataset import DatasetError, IndexedDataset
from .pages import release_pages
from .sample_order import SMALL, SampleOrder
from .sizes import Sizes

OFTEN = 256  # number of documents after whose reading memory-mapped pages and files are released


class Windows:
    """Windows of `length` + `overlap` tokens of the concatenated, shuffled documents.

    vocab_size: if given, reading a window with a token id outside the vocabulary raises DatasetError.
    Raises ValueError if the documents do not fill one window.
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
        self._indexed = indexed
        self._first = documents.start
        self._start_of = indexed.document_start
        limits = np.iinfo(indexed.dtype)
        self._checked = vocab_size is not None and vocab_size <= limits.max
        self._vocab_size = vocab_size or 0
        self._signed = limits.min < 0
        self._read = 0  # documents read since the last release of pages
        self._large = len(documents) > SMALL
        sizes = Sizes(indexed, documents)
        self.order = SampleOrder(sizes, length, seed, stream, overlap, folder=indexed.orders)

    def read(self, n: int) -> tuple[NDArray[np.int64], list[int]]:
        """Return (tokens of window n, number of tokens of each document in the window)."""
        self._indexed.refuse_shrunk()
        tokens = self._indexed.tokens
        pieces = self.order.pieces(n)
        self._read += len(pieces)
        if self._read > OFTEN:
            self._release()
        texts = []
        sizes = []
        for document, start, stop in pieces:
            base = self._start_of(self._first + document)
            texts.append(tokens[base + start : base + stop])
            sizes.append(stop - start)
        raw = np.concatenate(texts)
        if self._checked and self._is_outside(raw):
            self._refuse(n, raw)
        return raw.astype(np.int64), sizes

    def _is_outside(self, raw: NDArray[np.integer]) -> bool:
        """Return whether one of the token ids is outside the vocabulary."""
        if np.maximum.reduce(raw) >= self._vocab_size:  # faster than raw.max() for short arrays
            return True
        return self._signed and bool(raw.min() < 0)

    def _release(self) -> None:
        """Release what reading has mapped: reading one place of a large file keeps 64 kB or more of it in memory."""
        self._read = 0
        self._indexed.refresh()
        if not self._large:
            return
        self.order.release_pages()
        for array in (self._indexed.tokens, self._indexed.sizes):
            release_pages(array)

    def _refuse(self, n: int, raw: NDArray[np.integer]) -> None:
        bad = int(raw.max()) if raw.max() >= self._vocab_size else int(raw.min())
        where = [self._first + document for document, _, _ in self.order.pieces(n)]
        raise DatasetError(
            f"{self._indexed.prefix}.bin contains token id {bad} in one of the documents {where}, which is outside the "
            f"vocabulary of {self._vocab_size} tokens: the file is damaged or was made with another tokenizer"
        )

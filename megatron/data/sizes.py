"""Lengths of documents, read from the corpus on demand."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class HasSizes(Protocol):
    """Protocol of a corpus that provides the lengths of its documents, such as `IndexedDataset`."""

    def document_sizes(self, documents: range) -> NDArray[np.integer[Any]]:
        """Return the number of tokens of each document in the range."""
        ...


class Sizes(NamedTuple):
    """Lengths of the documents in a range, read from the corpus on demand so that a process needs no copy."""

    indexed: HasSizes
    documents: range

    def read(self) -> NDArray[np.integer[Any]]:
        """Return the number of tokens of each document in the range."""
        return self.indexed.document_sizes(self.documents)

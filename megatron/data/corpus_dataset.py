"""Base classes of data sets: samples of one corpus in a certain order, and a wrapper around another data set."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .sample_order import RELEASE_INTERVAL, Piece, SampleOrder

if TYPE_CHECKING:
    from .indexed_dataset import IndexedDataset
    from .packing import PackedOrder


class CorpusDataset(Dataset[dict[str, Tensor]]):
    """Base of the data sets of one corpus. Sample n exists for any n >= 0.

    prefix: prefix of the corpus; `build_datasets` sets it. documents: numbers of the documents that the samples use.
    order: order of the samples. seed: seed of the random choices in samples, such as masks; () if there are none.
    """

    prefix = ""
    seed: Sequence[int] = ()
    documents: range
    order: "SampleOrder | PackedOrder"
    _documents_read = 0  # documents read since the last refresh

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch of the documents."""
        return self.order.per_epoch

    def sample_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a run share an id."""
        return self.order.sample_ids(first, count)

    def pieces(self, n: int) -> list[Piece]:
        """Return (document, first token, last token + 1) of each document in sample n, in order."""
        first = self.documents.start
        return [(first + document, start, stop) for document, start, stop in self.order.pieces(int(n))]

    def refresh_after(self, documents: int, files: "Iterable[IndexedDataset]") -> None:
        """Count `documents` documents as read; refresh `files` after every RELEASE_INTERVAL documents."""
        self._documents_read += documents
        if self._documents_read > RELEASE_INTERVAL:
            self._documents_read = 0
            for each in files:
                each.refresh()

    def containing(self, documents: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch that contain tokens of `documents`, in ascending order."""
        return self.order.containing(documents - self.documents.start, epoch)


class WrappedDataset(Dataset[dict[str, Any]]):
    """Base of data sets that change samples of the data set `dataset`. All other attributes are those of `dataset`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # missing while pickle restores the object in a worker
            raise AttributeError(name)
        return getattr(self.dataset, name)

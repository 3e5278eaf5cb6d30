"""Processing of large arrays in slices, and release of the memory pages of memory-mapped arrays."""

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .indexed_dataset import IndexedDataset

AT_ONCE = 1 << 20  # length of the slices in which large arrays are processed
Arrays = dict[str, tuple[int, type[np.integer[Any]]]]  # name -> length, dtype


def slices_of(count: int) -> Iterator[slice]:
    """Yield slices that cover range(count), each at most `AT_ONCE` long."""
    for at in range(0, count, AT_ONCE):
        yield slice(at, min(at + AT_ONCE, count))


def runs_of(indexed: "IndexedDataset", documents: range, most: int) -> Iterator[range]:
    """Yield ranges of consecutive documents with at most `most` tokens; a longer document has its own range."""
    at = documents.start
    while at < documents.stop:
        window = range(at, min(at + most // 16, documents.stop))
        # Documents of 3, 4 and 5 tokens end at 3, 7 and 12, so the first two have at most 8 tokens.
        ends = np.cumsum(indexed.document_sizes(window), dtype=np.int64)
        fitting = int(ends.searchsorted(most, side="right"))
        stop = min(at + max(fitting, 1), documents.stop)
        yield range(at, stop)
        at = stop


def _base_of(array: Any) -> Any:
    """Return what owns the memory of an array or a view of one."""
    while isinstance(array, (np.ndarray, memoryview)):
        array = array.obj if isinstance(array, memoryview) else array.base
    return array


def release_pages(array: NDArray[Any]) -> None:
    """Release the resident pages of the memory map behind `array`; until then they count as memory of this process."""
    base = _base_of(array)
    if hasattr(base, "release_pages"):  # the tokens of a corpus in object storage
        base.release_pages()
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)

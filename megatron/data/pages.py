"""Processing of large arrays in slices, and release of the memory pages of memory-mapped arrays."""

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .indexed_dataset import IndexedDataset

SLICE_LENGTH = 1 << 20  # length of the slices in which large arrays are processed
Arrays = dict[str, tuple[int, type[np.integer[Any]]]]  # name -> length, dtype


def slices_of(count: int) -> Iterator[slice]:
    """Yield slices that cover range(count), each at most `SLICE_LENGTH` long."""
    for at in range(0, count, SLICE_LENGTH):
        yield slice(at, min(at + SLICE_LENGTH, count))


def document_ranges(indexed: "IndexedDataset", documents: range, max_tokens: int) -> Iterator[range]:
    """Yield ranges of consecutive documents with at most `max_tokens` tokens; a longer document has its own range."""
    begin = documents.start
    while begin < documents.stop:
        # At most max_tokens / 16 documents are considered at once, so that their sizes take little memory.
        candidates = range(begin, min(begin + max_tokens // 16, documents.stop))
        # Documents of 3, 4 and 5 tokens end at 3, 7 and 12, so the first two have at most 8 tokens.
        ends = np.cumsum(indexed.document_sizes(candidates), dtype=np.int64)
        fitting_count = int(ends.searchsorted(max_tokens, side="right"))
        stop = min(begin + max(fitting_count, 1), documents.stop)
        yield range(begin, stop)
        begin = stop


def release_pages(array: NDArray[Any]) -> None:
    """Release the resident pages of the memory map behind `array`; until then they count as memory of this process."""
    base: Any = array  # becomes what owns the memory of an array or a view of one
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    if hasattr(base, "release_pages"):  # the tokens of a corpus in object storage
        base.release_pages()
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)

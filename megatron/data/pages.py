"""Processing of large arrays in slices, and release of the memory pages of memory-mapped arrays."""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 1 << 20  # length of the slices in which large arrays are processed
Arrays = dict[str, tuple[int, type[np.integer[Any]]]]  # name -> length, dtype


def slices_of(count: int) -> Iterator[slice]:
    """Yield slices that cover range(count), each at most `AT_ONCE` long."""
    for at in range(0, count, AT_ONCE):
        yield slice(at, min(at + AT_ONCE, count))


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

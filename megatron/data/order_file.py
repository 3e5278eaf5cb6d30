"""File with the sample order of a large epoch, written once per node and memory-mapped by all processes of the node.

The order of an epoch of a billion documents takes 12 GB or more. Without the file, every rank and every data worker
would hold a copy in memory. Memory-mapped pages exist once per node and can be evicted. The file name is a hash of
everything that determines the content. The file gets this name when it is complete, and never changes afterwards.
"""

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..atomic import own_folder, temporary_name, whole_file

AT_ONCE = 1 << 20  # length of the slices in which large arrays are processed
Arrays = dict[str, tuple[int, type[np.integer[Any]]]]  # name -> length, dtype


def release_pages(array: NDArray[Any]) -> None:
    """Release the resident pages of the memory map behind `array`; until then they count as memory of this process."""
    base: Any = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    if hasattr(base, "release_pages"):  # the tokens of a corpus in object storage
        base.release_pages()
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def pieces(count: int) -> Iterator[slice]:
    """Yield slices that cover range(count), each at most `AT_ONCE` long."""
    yield from (slice(at, min(at + AT_ONCE, count)) for at in range(0, count, AT_ONCE))


def map_arrays(
    folder: str | os.PathLike[str], name: str, arrays: Arrays, make: Callable[[dict[str, NDArray[Any]]], None]
) -> dict[str, NDArray[Any]]:
    """Return the arrays in the file `folder/name`, read-only. If the file does not exist, create it and call `make`.

    arrays: name, length and dtype of each array. make: fills the new arrays.
    If the file cannot be created in `folder`, it goes to `scratch()`, and a message is printed on stderr.
    """
    places = [Path(folder) / name, scratch() / name]
    size = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays.values())
    found = next((path for path in places if _is_whole(path, size)), None)
    if found is None:
        with _node_lock(name):
            found = next((path for path in places if _is_whole(path, size)), None) or _create(
                places, arrays, size, make
            )
    return _views(found, arrays, "r")


def remove(folder: str | os.PathLike[str], name: str) -> None:
    """Delete an order file. Processes that have mapped the file can still read it."""
    for path in (Path(folder) / name, scratch() / name):
        with contextlib.suppress(OSError):
            path.unlink()


def scratch() -> Path:
    """Return this user's folder for order files on this machine. Raises ValueError if other users can write to it."""
    return own_folder("sample-orders")


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


@contextlib.contextmanager
def _node_lock(name: str) -> Iterator[None]:
    """Hold a lock among the processes of this node.

    The lock file is on local disk because some shared file systems lack locks.
    """
    with open(scratch() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _create(places: list[Path], arrays: Arrays, size: int, make: Callable[[dict[str, NDArray[Any]]], None]) -> Path:
    for path in places:
        temporary = temporary_name(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                # Without reserved space, writing to the map on a full disk would kill the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if path == places[-1]:
                raise
            print(
                f"cannot write the file with the sample order to {path.parent} ({error.strerror}); "
                f"it is written to {places[-1].parent} instead",
                file=sys.stderr,
            )
            continue
        with whole_file(path, temporary) as there:
            make(_views(there, arrays, "r+"))
        return path
    raise AssertionError("unreachable")


def _views(path: Path, arrays: Arrays, mode: Any) -> dict[str, NDArray[Any]]:
    raw = np.memmap(path, np.uint8, mode)
    found: dict[str, NDArray[Any]] = {}
    at = 0
    for name, (length, dtype) in arrays.items():
        end = at + length * np.dtype(dtype).itemsize
        found[name] = raw[at:end].view(np.ndarray).view(dtype)  # slicing an np.memmap is slow
        at = end
    return found

"""File with the sample order of a large epoch, written once per node and memory-mapped by all processes of the node.

The order of an epoch of a billion documents takes 12 GB or more. Without the file, every rank and every data worker
would hold a copy in memory. Memory-mapped pages exist once per node and can be evicted. The file name is a hash of
everything that determines the content. The file gets this name when it is complete, and never changes afterwards.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..atomic import file_lock, fsync_path, private_temp_folder, temporary_name
from .pages import Arrays

if TYPE_CHECKING:
    from .sample_order import SampleOrder

OrderArrays = dict[str, NDArray[Any]]  # name -> array of an epoch
FillArrays = Callable[[OrderArrays], None]  # function that fills new arrays


def map_epoch(sample_order: "SampleOrder", number: int, folder: str) -> OrderArrays | None:
    """Return the arrays of a large epoch in a file below `folder`, read-only; None if it can be written nowhere.

    The first process to ask creates the file. If it cannot be created in `folder`, it goes to `scratch_folder()`, and a
    message is printed on stderr.
    """
    name = _name_of(sample_order, number)
    specs = sample_order._array_specs()
    try:
        candidates = [Path(folder) / name, scratch_folder() / name]  # the second one if the first cannot be created
        path = _find_or_create(candidates, specs, lambda new: sample_order._fill_arrays(number, new))
        arrays = _map_views(path, specs, "r")
    except OSError as error:
        consequence = "every process keeps a copy in memory; to save memory, set TMPDIR to a folder with free space"
        print(f"cannot write the sample order to a file ({error.strerror}), so {consequence}", file=sys.stderr)
        return None
    # No process needs the epoch before the previous one any more, and an order file takes 12 or more bytes a document.
    remove(folder, _name_of(sample_order, number - 2))
    return arrays


def _name_of(sample_order: "SampleOrder", number: int) -> str:
    """Return the name of the order file: a hash of everything that determines the order of epoch `number`."""
    o = sample_order
    key = (o._sizes_digest, o.documents, o.length, o.overlap, True, o.seed, number)  # True: shuffled
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest() + ".order"


def remove(folder: str | os.PathLike[str], name: str) -> None:
    """Delete an order file. Processes that have mapped the file can still read it."""
    for path in (Path(folder) / name, scratch_folder() / name):
        with contextlib.suppress(OSError):
            path.unlink()


def scratch_folder() -> Path:
    """Return this user's folder for order files on this machine. Raises ValueError if other users can write to it."""
    return private_temp_folder("sample-orders")


def _find_or_create(candidates: list[Path], arrays: Arrays, fill: FillArrays) -> Path:
    """Return the path of the file, which one process of the node creates while the others wait; see `_create`."""
    size = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays.values())
    path = _find_file(candidates, size)
    if path is None:
        with file_lock(scratch_folder() / f"{candidates[0].name}.lock"):
            # Another process may have created the file while this one waited for the lock.
            path = _find_file(candidates, size) or _create(candidates, arrays, size, fill)
    return path


def _find_file(candidates: list[Path], size: int) -> Path | None:
    """Return the first of `candidates` that is a file of this size; None if there is none."""
    for path in candidates:
        with contextlib.suppress(OSError):
            if path.stat().st_size == size:
                return path
    return None


def _create(candidates: list[Path], arrays: Arrays, size: int, fill: FillArrays) -> Path:
    """Create the file at the first of the candidate paths whose disk has room for it; return this path.

    arrays: name -> (length, dtype) of each array in the file. size: bytes of the file. fill: fills the new arrays.
    Raises OSError if no disk has room.
    """
    for path in candidates:
        temporary = temporary_name(path)
        try:
            _reserve(temporary, size)
        except OSError as error:  # the disk is full, or this user may not write there
            if path == candidates[-1]:  # there is no other folder to try
                raise
            print(
                f"cannot write the file with the sample order to {path.parent} ({error.strerror}); "
                f"it is written to {candidates[-1].parent} instead",
                file=sys.stderr,
            )
            continue
        try:
            fill(_map_views(temporary, arrays, "r+"))
            # A machine may lose power. Without this, the file could have its size, but zeros instead of its content.
            fsync_path(temporary)
            # Ranks of other nodes may have mapped the file of their node, which must not be replaced then.
            if not _find_file([path], size):
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path
    raise AssertionError("unreachable")


def _reserve(path: Path, size: int) -> None:
    """Create a file of this size. Raises OSError and leaves no file if the disk has no space for it.

    Without reserved space, writing to the map on a full disk would kill the process with SIGBUS.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _map_views(path: Path, arrays: Arrays, mode: Any) -> OrderArrays:
    """Map a file of several arrays, one after the other, and return name -> array."""
    mapped = np.memmap(path, np.uint8, mode)
    views: OrderArrays = {}
    begin = 0
    for name, (length, dtype) in arrays.items():
        end = begin + length * np.dtype(dtype).itemsize
        views[name] = mapped[begin:end].view(np.ndarray).view(dtype)  # slicing an np.memmap is slow
        begin = end
    return views

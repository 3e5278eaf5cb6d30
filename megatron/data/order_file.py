"""File with the sample order of a large epoch, written once per node and memory-mapped by all processes of the node.

The order of an epoch of a billion documents takes 12 GB or more. Without the file, every rank and every data worker
would hold a copy in memory. Memory-mapped pages exist once per node and can be evicted. The file name is a hash of
everything that determines the content. The file gets this name when it is complete, and never changes afterwards.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..atomic import locked, own_folder, temporary_name, whole_file
from .pages import Arrays

Filled = dict[str, NDArray[Any]]  # name -> array of an epoch
Make = Callable[[Filled], None]  # function that fills new arrays


def map_or_none(folder: str, name: str, arrays: Arrays, make: Make) -> Filled | None:
    """Return the result of `map_arrays`; None if the file can be written nowhere, with a message on stderr."""
    try:
        return map_arrays(folder, name, arrays, make)
    except OSError as error:
        where = "every process keeps a copy in memory; to save memory, set TMPDIR to a folder with free space"
        print(f"cannot write the sample order to a file ({error.strerror}), so {where}", file=sys.stderr)
        return None


def map_arrays(folder: str | os.PathLike[str], name: str, arrays: Arrays, make: Make) -> Filled:
    """Return the arrays in the file `folder/name`, read-only. If the file does not exist, create it and call `make`.

    arrays: name, length and dtype of each array. make: fills the new arrays.
    If the file cannot be created in `folder`, it goes to `scratch()`, and a message is printed on stderr.
    """
    places = [Path(folder) / name, scratch() / name]
    size = sum(length * np.dtype(dtype).itemsize for length, dtype in arrays.values())
    path = _find(places, size)
    if path is None:
        with locked(scratch() / f"{name}.lock"):
            path = _find(places, size) or _create(places, arrays, size, make)
    return _views(path, arrays, "r")


def remove(folder: str | os.PathLike[str], name: str) -> None:
    """Delete an order file. Processes that have mapped the file can still read it."""
    for path in (Path(folder) / name, scratch() / name):
        with contextlib.suppress(OSError):
            path.unlink()


def scratch() -> Path:
    """Return this user's folder for order files on this machine. Raises ValueError if other users can write to it."""
    return own_folder("sample-orders")


def _find(places: list[Path], size: int) -> Path | None:
    """Return the first of `places` that is a file of this size; None if there is none."""
    for path in places:
        with contextlib.suppress(OSError):
            if path.stat().st_size == size:
                return path
    return None


def _create(places: list[Path], arrays: Arrays, size: int, make: Make) -> Path:
    for path in places:
        temporary = temporary_name(path)
        try:
            _reserve(temporary, size)
        except OSError as error:
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


def _views(path: Path, arrays: Arrays, mode: Any) -> Filled:
    raw = np.memmap(path, np.uint8, mode)
    found: Filled = {}
    at = 0
    for name, (length, dtype) in arrays.items():
        end = at + length * np.dtype(dtype).itemsize
        found[name] = raw[at:end].view(np.ndarray).view(dtype)  # slicing an np.memmap is slow
        at = end
    return found

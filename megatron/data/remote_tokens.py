"""Tokens of a corpus in object storage, read by byte ranges through a cache on local disk.

The processes of a node share the cache. It has one folder for each version of an object; in it, block n is the file
`n`. MEGATRON_CACHE_DIR names the cache's folder, MEGATRON_CACHE_GB is the limit of the size of all blocks together.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..atomic import own_folder, temporary_name, whole_file
from ..storage import RemotePath, StorageError

BLOCK = 4 << 20  # bytes
OPEN_BLOCKS = 1024  # mapped blocks of a corpus in a process
DEFAULT_GB = 50.0
LOCKS = 64  # maximum number of blocks of an object that are downloaded at the same time
FOLDER, LIMIT = "MEGATRON_CACHE_DIR", "MEGATRON_CACHE_GB"


def cache_folder() -> Path:
    """Return the folder of the cache. Raises ValueError if other users can write to the default folder."""
    given = os.environ.get(FOLDER)
    folder = Path(given) if given else own_folder("megatron-cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_limit() -> int:
    """Return the largest size of all blocks in bytes. Raises ValueError for a wrong MEGATRON_CACHE_GB."""
    given = os.environ.get(LIMIT, str(DEFAULT_GB))
    with contextlib.suppress(ValueError):
        if (limit := float(given)) > 0:
            return int(min(limit, 1e9) * 1e9)
    raise ValueError(f"{LIMIT}={given} must be a number of gigabytes greater than 0")


def folder_of(path: RemotePath, stamp: tuple[int, str]) -> Path:
    """Return the folder of one version of an object in the cache."""
    key = hashlib.sha256(repr((str(path), stamp, BLOCK)).encode()).hexdigest()[:32]
    folder = cache_folder() / key
    folder.mkdir(exist_ok=True)
    return folder


def local_copy(path: RemotePath) -> Path:
    """Return the copy of an object in the cache, and download the object if there is none."""
    stamp = path.stamp()
    there = folder_of(path, stamp) / "whole"
    with _locked(there.with_name("whole.lock")):
        if not there.is_file():
            with whole_file(there) as new:
                path.download(new)
                _refuse_change(path, stamp)
    return there


class _Map:
    """Read-only memory map of a file as a numpy array of bytes.

    Unlike Python's mmap before 3.13, it keeps no file descriptor, so that a process can map thousands of blocks.
    Raises OSError.
    """

    _libc: ClassVar[Any] = None

    def __init__(self, file: int, size: int) -> None:
        if _Map._libc is None:
            libc = ctypes.CDLL(None, use_errno=True)
            numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
            libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *numbers)
            libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            _Map._libc = libc
        self._place = None
        found = self._libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._place = found, size
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (found, True), "version": 3}

    def release(self) -> None:
        """Release the resident pages, which count as memory of this process."""
        if self._place is not None:
            self._libc.madvise(*self._place, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self._place is not None:
            self._libc.munmap(*self._place)


class RemoteTokens:
    """Array of tokens in object storage, with the slices of a one-dimensional numpy array.

    stamp: version of the object that a process has opened before; None takes the present one.
    Raises StorageError if the object is another one than that of `stamp`, also later, when a block is downloaded.
    """

    def __init__(self, path: RemotePath, dtype: np.dtype[Any], stamp: tuple[int, str] | None = None) -> None:
        self.path, self.dtype, self.stamp = path, dtype, path.stamp()
        if stamp is not None:
            _refuse_change(path, stamp)
        self._length = self.stamp[0] // dtype.itemsize
        self._per_block = BLOCK // dtype.itemsize
        self._folder, self._limit = folder_of(path, self.stamp), cache_limit()
        self._maps: dict[int, NDArray[Any]] = {}
        self._new, self._allowed = 0, max(self._limit // (64 * BLOCK), 1)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> NDArray[Any]:
        start, stop = where.start, where.stop
        if start is None or stop is None or not 0 <= start <= stop <= self._length:
            start, stop, _ = where.indices(self._length)
        number = start // self._per_block
        begin = number * self._per_block
        if stop <= begin + self._per_block:
            if start >= stop:
                return np.empty(0, self.dtype)
            block = self._maps.get(number)
            return (block if block is not None else self._open(number))[start - begin : stop - begin]
        numbers = range(number, (stop - 1) // self._per_block + 1)
        return np.concatenate([self._open(each) for each in numbers])[start - begin : stop - begin]

    def joined(self, spans: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Return the tokens from start to stop - 1 of each (start, stop), one after another. Faster than slices."""
        blocks, length, found = self._maps, self._per_block, []
        for start, stop in spans:
            number, first = divmod(start, length)
            block = blocks.get(number) if first + stop - start <= length else None
            found.append(self[start:stop] if block is None else block[first : first + stop - start])
        return np.concatenate(found)

    def release_pages(self) -> None:
        """Release the resident pages of all mapped blocks."""
        for block in self._maps.values():
            base: Any = block.base
            while isinstance(base, np.ndarray):
                base = base.base
            if isinstance(base, _Map):
                base.release()

    def _open(self, number: int) -> NDArray[Any]:
        found = self._maps.get(number)
        if found is None:
            found = self._mapped(number)
            if found is None:
                found = self._downloaded(number)
            if len(self._maps) >= OPEN_BLOCKS:
                del self._maps[next(iter(self._maps))]
            self._maps[number] = found
        return found

    def _bytes(self, number: int) -> range:
        size = self._length * self.dtype.itemsize
        return range(number * BLOCK, min((number + 1) * BLOCK, size))

    def _mapped(self, number: int) -> NDArray[Any] | None:
        path = self._folder / str(number)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != len(self._bytes(number)):
                    return None
                raw = _Map(file.fileno(), size)
                os.utime(file.fileno())  # when the cache is full, the blocks unused for the longest time are deleted
        except OSError:  # the block is not there
            return None
        return np.asarray(raw).view(self.dtype)

    def _downloaded(self, number: int) -> NDArray[Any]:
        with _locked(self._folder / f"{number % LOCKS}.lock"):
            found = self._mapped(number)  # another process may have downloaded the block meanwhile
            if found is not None:
                return found
            here = self._bytes(number)
            try:
                data = self.path.read_range(here.start, here.stop)
            except StorageError:
                if self._has_changed():  # the object may have become shorter
                    _refuse_change(self.path, self.stamp)
                raise
            _refuse_change(self.path, self.stamp)
            self._keep(number, data)
        return np.frombuffer(data, self.dtype)

    def _has_changed(self) -> bool:
        try:
            return self.path.stamp() != self.stamp
        except OSError:  # the server is down, or the object is gone
            return False

    def _keep(self, number: int, data: bytes) -> None:
        """Write a block into the cache. On a full disk, training continues without it."""
        path = self._folder / str(number)
        try:
            with whole_file(path, temporary_name(path)) as new:
                new.write_bytes(data)
            self._new += 1
            if self._new >= self._allowed:
                self._new = 0
                evict(cache_folder(), self._limit)
        except OSError as error:
            print(f"note: a block of {self.path} is not kept in the cache {path.parent}: {error}", file=sys.stderr)


def evict(folder: Path, limit: int) -> None:
    """Delete the blocks that were not used for the longest time until the rest fits into 7/8 of `limit` bytes.

    Deletes nothing if all blocks fit into `limit`. Processes that have mapped a block can still read it.
    """
    blocks, total = [], 0
    for path in folder.glob("*/*"):
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                about = path.stat()
                blocks.append((about.st_mtime_ns, about.st_size, path))
                total += about.st_size
    if total <= limit:
        return
    for _, size, path in sorted(blocks):
        if total <= limit - limit // 8:
            return
        path.unlink(missing_ok=True)
        total -= size


def _refuse_change(path: RemotePath, stamp: tuple[int, str]) -> None:
    if path.stamp() != stamp:
        raise StorageError(
            f"{path} has changed since this run opened it: start the run again, and do not change a corpus in use"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Any:
    """Hold a lock among the processes of this node."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

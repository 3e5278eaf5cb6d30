"""Tokens of a corpus in object storage, read by byte ranges through a cache on local disk.

The processes of a node share the cache. It has one folder for each version of an object. In it, the sparse file `n`
holds the n-th `BLOCKS` blocks of the object, and after them one byte for each block: 1 if the block is there.
MEGATRON_CACHE_DIR names the cache's folder, MEGATRON_CACHE_GB is the limit of its size.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..atomic import locked, naming, own_folder, whole_file
from ..storage import RemotePath, StorageError, require_local

Array = NDArray[Any]
BLOCK = 4 << 20  # bytes that are downloaded at once
BLOCKS = 64  # number of blocks in a file of the cache
IN_MEMORY = 256  # blocks of an object that a process keeps in memory if the cache cannot be written
DEFAULT_GB = 50.0
COPY = "whole"  # file name of the copy of a whole object
RECENT = 3600.0  # seconds; a process may be opening the copy that it has just found
HUGE = 2 << 20  # bytes of a huge page
MAP_FIXED = 0x10  # of mmap; Python has no name for it
LOCKS = 64  # maximum number of blocks of an object that are downloaded at the same time
FOLDER, LIMIT = "MEGATRON_CACHE_DIR", "MEGATRON_CACHE_GB"


def cache_folder() -> Path:
    """Return the folder of the cache. Raises ValueError if other users can write to the default folder."""
    given = os.environ.get(FOLDER)
    folder = Path(require_local(given)) if given else own_folder("megatron-cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_limit() -> int:
    """Return the largest size of the cache in bytes. Raises ValueError for a wrong MEGATRON_CACHE_GB."""
    given = os.environ.get(LIMIT, str(DEFAULT_GB))
    with contextlib.suppress(ValueError):
        if (limit := float(given)) > 0:
            return int(min(limit, 1e9) * 1e9)
    raise ValueError(f"{LIMIT}={given} must be a number of gigabytes greater than 0")


def folder_of(path: RemotePath, stamp: tuple[int, str]) -> Path:
    """Return the folder of one version of an object in the cache."""
    key = hashlib.sha256(repr((str(path), stamp, BLOCK, BLOCKS)).encode()).hexdigest()[:32]
    folder = cache_folder() / key
    folder.mkdir(exist_ok=True)
    return folder


def local_copy(path: RemotePath) -> Path:
    """Return the copy of an object in the cache, and download the object if there is none."""
    stamp = path.stamp()
    there = folder_of(path, stamp) / COPY
    with locked(there.with_name(f"{COPY}.lock")):
        if there.is_file():
            os.utime(there)
        else:
            with whole_file(there) as new:
                path.download(new)
                _refuse_change(path, stamp)
    return there


class _Region:
    """Range of addresses for an object, at which files of the cache are mapped; read-only numpy array of bytes.

    Reading bytes of a file that is not mapped crashes the process.
    """

    _libc: ClassVar[Any] = None

    def __init__(self, size: int) -> None:
        if _Region._libc is None:
            libc = ctypes.CDLL(None, use_errno=True)
            numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
            libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            _Region._libc = libc
        self._size = size + HUGE
        self._begin = None
        self._begin = self._map(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        # The kernel maps whole huge pages of a file only at multiples of their size; reading is then about 10 % faster.
        self._first = -(-self._begin // HUGE) * HUGE
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (self._first, True), "version": 3}

    def _map(self, at: int | None, size: int, access: int, kind: int, file: int) -> int:
        found: int = self._libc.mmap(at, size, access, kind, file, 0)
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    def put(self, at: int, file: int) -> None:
        """Map an open file of the cache at byte `at`. Raises OSError."""
        size = min(BLOCK * BLOCKS, self._size - HUGE - at)
        self._map(self._first + at, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)

    def release_pages(self) -> None:
        """Release the resident pages, which count as memory of this process."""
        self._libc.madvise(self._begin, self._size, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self._begin is not None:
            self._libc.munmap(self._begin, self._size)


class RemoteTokens:
    """Array of tokens in object storage, with the slices of a one-dimensional numpy array. Not for several threads.

    stamp: version of the object that a process has opened before; None takes the present one.
    Raises StorageError if the object is another one than that of `stamp`, also later, when a block is downloaded.
    """

    def __init__(self, path: RemotePath, dtype: np.dtype[Any], stamp: tuple[int, str] | None = None) -> None:
        self.path = path
        self.dtype = dtype
        self.stamp = path.stamp()
        if stamp is not None:
            _refuse_change(path, stamp)
        self._length = self.stamp[0] // dtype.itemsize
        self._per_block = BLOCK // dtype.itemsize
        self._folder = folder_of(path, self.stamp)
        self._limit = cache_limit()
        self._in_memory: dict[int, Array] = {}
        self._allowed = max(self._limit // (64 * BLOCK), 1)  # blocks to keep before the size of the cache is checked
        self._new = 0  # blocks kept since then
        self._changed = 0  # time at which the folder has last changed
        self._unmap()

    def _unmap(self) -> None:
        """Begin again without mapped files. Arrays that have been returned keep theirs."""
        self._region = _Region(self._length * self.dtype.itemsize)
        self._tokens: Array = np.asarray(self._region).view(self.dtype)
        self._blocks = -(-self._length // self._per_block)
        self._there = bytearray(self._blocks + BLOCKS)  # 1 for each block that can be read at its place in the region
        self._files = dict[int, int]()  # inode of each mapped file

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Array:
        start, stop, _ = where.indices(self._length)
        if start >= stop:
            return np.empty(0, self.dtype)
        first = start // self._per_block
        end = (stop - 1) // self._per_block + 1
        if self._there.find(0, first, end) < 0:
            return self._tokens[start:stop]
        blocks = [self._block(number) for number in range(first, end)]
        found = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return found[start - first * self._per_block : stop - first * self._per_block]

    def refresh(self) -> "Array | RemoteTokens":
        """Return an equal array, as fast as that of a local file if all blocks are in the cache, else this one.

        Call it again from time to time: it releases files that were deleted to make room. Their space on the disk is
        free when no process maps them.
        """
        with contextlib.suppress(OSError):  # if somebody has deleted the folder, mapped files can still be read
            changed = os.stat(self._folder).st_mtime_ns
            if changed != self._changed and self._has_deleted_files():
                self._unmap()
            self._changed = changed
        return self._tokens if self._there.count(1) == self._blocks else self

    def _has_deleted_files(self) -> bool:
        return any(_inode(self._folder / str(n)) != inode for n, inode in self._files.items())

    def release_pages(self) -> None:
        """Release the resident pages of all mapped files."""
        self._region.release_pages()

    def _block(self, number: int) -> Array:
        found = self._cached(number)
        return self._downloaded(number) if found is None else found

    def _cached(self, number: int) -> Array | None:
        if not self._there[number]:
            self._look(number // BLOCKS)
        if self._there[number]:
            return self._tokens[number * self._per_block : (number + 1) * self._per_block]
        return self._in_memory.get(number)

    def _look(self, n: int) -> None:
        """Map file n, and read which blocks it has."""
        path = self._folder / str(n)
        with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file, naming(path):
            inode = os.fstat(file.fileno()).st_ino
            if self._files.get(n) != inode:
                if n in self._files:  # the mapped file has been deleted, and another process has begun a new one
                    self._unmap()
                self._region.put(n * BLOCKS * BLOCK, file.fileno())
                self._files[n] = inode
                os.utime(file.fileno())  # when the cache is full, the files unused for the longest time are deleted
            found = os.pread(file.fileno(), BLOCKS, BLOCKS * BLOCK)
            self._there[n * BLOCKS : n * BLOCKS + len(found)] = found

    def _downloaded(self, number: int) -> Array:
        with contextlib.suppress(OSError):  # somebody may have deleted the cache while the run reads from it
            self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / f"{number % LOCKS}.lock"):
            found = self._cached(number)  # another process may have downloaded the block meanwhile
            if found is not None:
                return found
            begin = number * BLOCK
            try:
                data = self.path.read_range(begin, min(begin + BLOCK, self._length * self.dtype.itemsize))
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
        path = self._folder / str(number // BLOCKS)
        try:
            with naming(path), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                file.seek(number % BLOCKS * BLOCK)
                file.write(data)
                file.flush()
                os.fdatasync(file.fileno())  # if the machine crashes, the next byte must not be there without the block
                file.seek(BLOCKS * BLOCK + number % BLOCKS)
                file.write(b"\1")
            self._new += 1
            if self._new >= self._allowed:
                self._new = 0
                evict(cache_folder(), self._limit)
        except OSError as error:
            print(f"note: a block of {self.path} is not kept in the cache {path.parent}: {error}", file=sys.stderr)
            if len(self._in_memory) >= IN_MEMORY:
                del self._in_memory[next(iter(self._in_memory))]
            self._in_memory[number] = np.frombuffer(data, self.dtype)


def cached_pieces(folder: Path, begin: int, end: int) -> list[tuple[Path, int, int]] | None:
    """Return where the cache `folder` of an object has bytes `begin` to `end` - 1; None if it lacks a part of them.

    The pieces are in order: a file, the offset of the piece in it and its length, at most `BLOCK`.
    """
    found = []
    for number in range(begin // BLOCK, -(-end // BLOCK)):
        path = folder / str(number // BLOCKS)
        place_in_file = number % BLOCKS
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            if os.pread(file.fileno(), 1, BLOCKS * BLOCK + place_in_file) == b"\1":
                first = max(begin, number * BLOCK)
                last = min(end, (number + 1) * BLOCK)
                found.append((path, place_in_file * BLOCK + first % BLOCK, last - first))
                continue
        return None
    return found


def evict(folder: Path, limit: int) -> None:
    """Delete the files that were not used for the longest time until the rest fits into 7/8 of `limit` bytes.

    Deletes nothing if all files fit into `limit`. Tokens are deleted before copies of objects; copies that were opened
    less than `RECENT` seconds ago stay. Processes that have mapped a file can still read it.
    """
    files = []
    total = 0
    now = time.time()
    for path in folder.glob(f"{'[0-9a-f]' * 32}/*"):
        if path.name.isdigit() or path.name == COPY:
            with contextlib.suppress(OSError):
                about = path.stat()
                size = about.st_blocks * 512  # the files are sparse
                total += size
                if path.name != COPY or about.st_mtime < now - RECENT:
                    files.append((path.name == COPY, about.st_mtime_ns, size, path))
    if total <= limit:
        return
    for _, _, size, path in sorted(files):
        if total <= limit - limit // 8:
            return
        path.unlink(missing_ok=True)
        total -= size


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _refuse_change(path: RemotePath, stamp: tuple[int, str]) -> None:
    if path.stamp() != stamp:
        raise StorageError(
            f"{path} has changed since this run opened it: start the run again, and do not change a corpus in use"
        )

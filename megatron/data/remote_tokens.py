"""Tokens of a corpus in object storage, read by byte ranges through a cache on local disk.

The processes of a node share the cache. It has one folder for each version of an object. In it, the sparse file `n`
holds the n-th `BLOCKS_PER_FILE` blocks of the object, and after them one byte for each block: 1 if the block is there.
MEGATRON_CACHE_DIR names the cache's folder, MEGATRON_CACHE_GB is the limit of its size.
"""

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..atomic import atomic_file, file_lock, name_in_errors, private_temp_folder
from ..storage import RemotePath, StorageError, require_local

if TYPE_CHECKING:
    from .indexed_dataset import IndexedDataset

Array = NDArray[Any]
BLOCK = 4 << 20  # bytes that are downloaded at once
BLOCKS_PER_FILE = 64  # number of blocks in a file of the cache
MEMORY_BLOCKS = 256  # blocks of an object that a process keeps in memory if the cache cannot be written
DEFAULT_GB = 50.0
WHOLE_COPY = "whole"  # file name of the copy of a whole object
RECENT_SECONDS = 3600.0  # seconds; a process may be opening the copy that it has just found
HUGE_PAGE = 2 << 20  # bytes of a huge page
MAP_FIXED = 0x10  # of mmap; Python has no name for it
BLOCK_LOCKS = 64  # maximum number of blocks of an object that are downloaded at the same time
FOLDER_VARIABLE = "MEGATRON_CACHE_DIR"
LIMIT_VARIABLE = "MEGATRON_CACHE_GB"


def cache_folder() -> Path:
    """Return the folder of the cache. Raises ValueError if other users can write to the default folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    folder = Path(require_local(chosen)) if chosen else private_temp_folder("megatron-cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_limit() -> int:
    """Return the largest size of the cache in bytes. Raises ValueError for a wrong MEGATRON_CACHE_GB."""
    given = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_GB))
    with contextlib.suppress(ValueError):
        if (limit := float(given)) > 0:
            return int(min(limit, 1e9) * 1e9)  # 1e9 GB at most, as int() would refuse infinity
    raise ValueError(f"{LIMIT_VARIABLE}={given} must be a number of gigabytes greater than 0")


def version_folder(path: RemotePath, stamp: tuple[int, str]) -> Path:
    """Return the folder of one version of an object in the cache."""
    key = hashlib.sha256(repr((str(path), stamp, BLOCK, BLOCKS_PER_FILE)).encode()).hexdigest()[:32]
    folder = cache_folder() / key
    folder.mkdir(exist_ok=True)
    return folder


def local_copy(path: RemotePath) -> Path:
    """Return the copy of an object in the cache, and download the object if there is none."""
    stamp = path.stamp()
    copy = version_folder(path, stamp) / WHOLE_COPY
    with file_lock(copy.with_name(f"{WHOLE_COPY}.lock")):
        if copy.is_file():
            os.utime(copy)
        else:
            with atomic_file(copy) as temporary:
                path.download(temporary)
                _check_unchanged(path, stamp)
    return copy


@functools.cache
def _load_libc() -> Any:
    """Return the C library, with the types of mmap, munmap and madvise.

    Python's module `mmap` cannot map a file at a given address.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p
    number = ctypes.c_int
    length = ctypes.c_size_t
    libc.mmap.restype = address
    # Address, length, protection, flags, file and offset.
    libc.mmap.argtypes = (address, length, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (address, length)
    libc.madvise.argtypes = (address, length, number)
    return libc


class _Region:
    """Range of addresses for an object, at which files of the cache are mapped; read-only numpy array of bytes.

    Reading bytes of a file that is not mapped crashes the process.
    """

    def __init__(self, size: int) -> None:
        self._libc = _load_libc()
        self._size = size + HUGE_PAGE  # room to begin at the next multiple of HUGE_PAGE
        self._begin = None  # for __del__, if the next line fails
        # Reserve addresses without memory: 0 permits no access, and -1 is no file.
        self._begin = self._map(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        # The kernel maps whole huge pages of a file only at multiples of their size; reading is then about 10 % faster.
        self._aligned_begin = -(-self._begin // HUGE_PAGE) * HUGE_PAGE  # rounded up
        # numpy reads this attribute: an array of `size` unsigned bytes (|u1) at this address, read-only.
        data = (self._aligned_begin, True)
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": data, "version": 3}

    def _map(self, address_wanted: int | None, size: int, protection: int, flags: int, file: int) -> int:
        address: int = self._libc.mmap(address_wanted, size, protection, flags, file, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return address

    def map_file(self, offset: int, file: int) -> None:
        """Map an open file of the cache at byte `offset`. Raises OSError."""
        size = min(BLOCK * BLOCKS_PER_FILE, self._size - HUGE_PAGE - offset)  # the last file may have fewer blocks
        self._map(self._aligned_begin + offset, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)

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
            _check_unchanged(path, stamp)
        num_bytes = self.stamp[0]  # a stamp is the size of an object, and its version
        self._length = num_bytes // dtype.itemsize
        self._per_block = BLOCK // dtype.itemsize
        self._folder = version_folder(path, self.stamp)
        self._limit = cache_limit()
        self._in_memory: dict[int, Array] = {}  # blocks by number that could not be stored, as on a full disk
        # The size of the cache is checked whenever this process has stored 1/64 of the limit.
        self._blocks_per_check = max(self._limit // (64 * BLOCK), 1)
        self._stored_blocks = 0  # blocks stored since the last check
        self._folder_mtime = 0  # time of the folder's last change that `refresh` has seen, to find deleted files
        self._reset_region()

    def _reset_region(self) -> None:
        """Begin again without mapped files. Arrays that have been returned keep theirs."""
        self._region = _Region(self._length * self.dtype.itemsize)
        self._mapped_tokens: Array = np.asarray(self._region).view(self.dtype)
        self._blocks = -(-self._length // self._per_block)  # rounded up, as the last block may be shorter
        # 1 for each block that can be read in the region; the last file may have flags of more blocks.
        self._readable = bytearray(self._blocks + BLOCKS_PER_FILE)
        self._files = dict[int, int]()  # inode of each mapped file

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> Array:
        start, stop, _ = index.indices(self._length)
        if start >= stop:
            return np.empty(0, self.dtype)
        per_block = self._per_block
        first_block = start // per_block
        end_block = (stop - 1) // per_block + 1
        if all(self._readable[first_block:end_block]):  # the blocks are mapped, side by side
            return self._mapped_tokens[start:stop]
        # Else some must be mapped or downloaded, or are in memory, apart from the others.
        blocks = list(map(self._get_block, range(first_block, end_block)))
        tokens = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        first_token = first_block * per_block
        return tokens[start - first_token : stop - first_token]

    def refresh(self) -> "Array | RemoteTokens":
        """Return an equal array, as fast as that of a local file if all blocks are in the cache, else this one.

        Call it again from time to time: it releases files that were deleted to make room. Their space on the disk is
        free when no process maps them.
        """
        with contextlib.suppress(OSError):  # if somebody has deleted the folder, mapped files can still be read
            mtime = os.stat(self._folder).st_mtime_ns
            if mtime != self._folder_mtime:
                # A file that was deleted has no inode, and one that was then downloaded again has another inode.
                were_deleted = (_inode(self._folder / str(n)) != inode for n, inode in self._files.items())
                if any(were_deleted):
                    self._reset_region()
            self._folder_mtime = mtime
        # If all blocks are mapped, the plain array needs no check in __getitem__.
        return self._mapped_tokens if self._readable.count(1) == self._blocks else self

    def release_pages(self) -> None:
        """Release the resident pages of all mapped files."""
        self._region.release_pages()

    def _find_block(self, number: int) -> Array | None:
        """Return a block that is in the cache or in memory, else None."""
        if not self._readable[number]:
            self._map_file(number // BLOCKS_PER_FILE)
        if self._readable[number]:
            return self._mapped_tokens[number * self._per_block : (number + 1) * self._per_block]
        return self._in_memory.get(number)

    def _map_file(self, n: int) -> None:
        """Map file n, and read which blocks it has."""
        path = self._folder / str(n)
        with contextlib.suppress(FileNotFoundError), open(path, "rb", buffering=0) as file, name_in_errors(path):
            descriptor = file.fileno()
            inode = os.fstat(descriptor).st_ino
            first_block = n * BLOCKS_PER_FILE
            if self._files.get(n) != inode:
                if n in self._files:  # the mapped file has been deleted, and another process has begun a new one
                    self._reset_region()
                self._region.map_file(first_block * BLOCK, descriptor)
                self._files[n] = inode
                os.utime(descriptor)  # when the cache is full, the files unused for the longest time are deleted
            # After the blocks, the file has a byte for each of them: 1 if the block is there.
            flags = os.pread(descriptor, BLOCKS_PER_FILE, BLOCKS_PER_FILE * BLOCK)
            self._readable[first_block : first_block + len(flags)] = flags

    def _get_block(self, number: int) -> Array:
        """Return a block. If it is not in the cache, download and store it, unless another process has just done so."""
        block = self._find_block(number)
        if block is not None:
            return block
        with contextlib.suppress(OSError):  # somebody may have deleted the cache while the run reads from it
            self._folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self._folder / f"{number % BLOCK_LOCKS}.lock"):
            block = self._find_block(number)  # another process may have downloaded the block meanwhile
            if block is not None:
                return block
            begin = number * BLOCK
            try:
                data = self.path.read_range(begin, min(begin + BLOCK, self._length * self.dtype.itemsize))
            except StorageError:
                _check_unchanged(self.path, self.stamp)  # the object may have become shorter
                raise
            _check_unchanged(self.path, self.stamp)
            self._store_block(number, data)
        return np.frombuffer(data, self.dtype)

    def _store_block(self, number: int, data: bytes) -> None:
        """Write a block into the cache. On a full disk, training continues without it."""
        path = self._folder / str(number // BLOCKS_PER_FILE)
        index_in_file = number % BLOCKS_PER_FILE
        try:
            # No mode of open() writes inside a file and also creates it if it is missing; os.open() does.
            with name_in_errors(path), open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                file.seek(index_in_file * BLOCK)
                file.write(data)
                file.flush()
                os.fdatasync(file.fileno())  # if the machine crashes, the next byte must not be there without the block
                # After all blocks, the file has a byte for each of them: 1 if the block is there.
                file.seek(BLOCKS_PER_FILE * BLOCK + index_in_file)
                file.write(b"\1")
            self._stored_blocks += 1
            if self._stored_blocks >= self._blocks_per_check:
                self._stored_blocks = 0
                evict(cache_folder(), self._limit)
        except OSError as error:
            print(f"note: a block of {self.path} is not kept in the cache {path.parent}: {error}", file=sys.stderr)
            if len(self._in_memory) >= MEMORY_BLOCKS:
                del self._in_memory[next(iter(self._in_memory))]  # the oldest block
            self._in_memory[number] = np.frombuffer(data, self.dtype)


def open_tokens(indexed: "IndexedDataset", data: RemotePath, stamp: tuple[int, str] | None) -> None:
    """Let `indexed` read its .bin in object storage through the cache. stamp: its version when it was opened before."""
    remote = RemoteTokens(data, indexed.dtype, stamp)
    indexed._remote = remote
    indexed._stamp = remote.stamp
    indexed.tokens = cast(NDArray[Any], remote)
    indexed.orders_folder = os.fspath(version_folder(data, remote.stamp) / "orders")


def cached_pieces(folder: Path, begin: int, end: int) -> list[tuple[Path, int | None, int, int]] | None:
    """Return where the cache `folder` of an object has bytes `begin` to `end` - 1; None if it lacks a part of them.

    The pieces are in order: a file, its inode, the offset of the piece in it and its length, at most `BLOCK`.
    """
    pieces = []
    for number in range(begin // BLOCK, -(-end // BLOCK)):  # rounded up, to include the block of the last byte
        path = folder / str(number // BLOCKS_PER_FILE)
        index_in_file = number % BLOCKS_PER_FILE
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            # After all blocks, the file has a byte for each of them: 1 if the block is there.
            if os.pread(file.fileno(), 1, BLOCKS_PER_FILE * BLOCK + index_in_file) == b"\1":
                # The first and the last block may lie only partly between `begin` and `end`.
                piece_begin = max(begin, number * BLOCK)
                piece_end = min(end, (number + 1) * BLOCK)
                offset = index_in_file * BLOCK + piece_begin % BLOCK
                pieces.append((path, _inode(path), offset, piece_end - piece_begin))
                continue
        return None  # the file or the block is missing
    return pieces


def evict(folder: Path, limit: int) -> None:
    """Delete the files that were not used for the longest time until the rest fits into 7/8 of `limit` bytes.

    Deletes nothing if all files fit into `limit`. Tokens are deleted before copies of objects; copies that were opened
    less than `RECENT_SECONDS` seconds ago stay. Processes that have mapped a file can still read it.
    """
    files = []
    total = 0
    now = time.time()
    for path in folder.glob(f"{'[0-9a-f]' * 32}/*"):
        is_copy = path.name == WHOLE_COPY
        if path.name.isdigit() or is_copy:
            with contextlib.suppress(OSError):
                status = path.stat()
                size = status.st_blocks * 512  # the files are sparse
                total += size
                # Files of tokens, and copies that were not opened recently, may be deleted.
                if not is_copy or status.st_mtime < now - RECENT_SECONDS:
                    # False sorts before True, so tokens come before copies of objects, and old files before new ones.
                    files.append((is_copy, status.st_mtime_ns, size, path))
    if total <= limit:
        return
    for _, _, size, path in sorted(files):
        if total <= limit - limit // 8:  # room for many blocks, so that the next check deletes nothing
            return
        path.unlink(missing_ok=True)
        total -= size


def _inode(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _check_unchanged(path: RemotePath, stamp: tuple[int, str]) -> None:
    if path.stamp() != stamp:
        raise StorageError(
            f"{path} has changed since this run opened it: start the run again, and do not change a corpus in use"
        )

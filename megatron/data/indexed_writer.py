"""Writing `.bin/.idx` pairs (indexed_dataset.py has the format) in constant memory.

Tokens, lengths and documents go to temporary files as they come; the index is put together from
them at the end, block by block. The pair gets its names last, the .idx after the .bin: an .idx
proves a whole pair. A writer can say how far it is and a later one can go on from there.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..atomic import naming, process_name
from .indexed_dataset import CODES, HEADER, MAGIC, VERSION

BLOCK = 1 << 26  # bytes of a .bin under one checksum
AT_ONCE = 1 << 20  # entries of the index in memory at once


class IndexedDatasetBuilder:
    """Writes a pair. Use as a context manager: an error inside leaves nothing behind.

    state: what `state()` of a writer to the same prefix said; what that one wrote later is cut off.
    suffix: of the temporary files. Raises ValueError for ids that the dtype cannot hold, and where temporary
    files are not what the state says.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: type[np.integer[Any]] | np.dtype[Any] = np.int32,
        suffix: str | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        suffix = suffix or f"{process_name()}.tmp"
        self._names = {part: f"{self.prefix}.{part}.{suffix}" for part in ("bin", "sizes", "documents", "idx")}
        sizes = (state["bytes"], 4 * state["sequences"], 8 * state["documents"]) if state else (None,) * 3
        digests = state["digests"] if state else (None,) * 3
        self._tokens, self._sizes, self._documents = (
            _Log(self._names[part], size, digest)
            for part, size, digest in zip(("bin", "sizes", "documents"), sizes, digests, strict=True)
        )
        self.sequences: int = state["sequences"] if state else 0
        self.documents: int = state["documents"] if state else 0
        self.checksums: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        """That were written so far."""
        return self._tokens.size // self.dtype.itemsize

    def add_document(self, ids: Sequence[int] | NDArray[Any], lengths: Sequence[int] | None = None) -> None:
        """Append one document of one sequence, or of several sequences of the given lengths."""
        sizes = np.array([len(ids)] if lengths is None else lengths, dtype=np.int64)
        self.add_batch(np.asarray(ids), sizes, np.array([len(sizes)]))

    def add_batch(self, ids: NDArray[Any], lengths: NDArray[Any], sequences_per_document: NDArray[Any]) -> None:
        """Append many documents at once.

        ids: all tokens, back to back. lengths: tokens of each sequence. sequences_per_document:
        how many of these sequences each document has.
        """
        if int(lengths.sum()) != len(ids) or int(sequences_per_document.sum()) != len(lengths):
            raise ValueError("lengths and tokens, or documents and sequences, do not add up")
        if len(lengths) and (int(lengths.max()) > np.iinfo(np.int32).max or int(lengths.min()) < 0):
            raise ValueError(f"a sequence of {int(lengths.max())} tokens is too long for the format; split it")
        self._tokens.write(little(fit(ids, self.dtype, f"{self.prefix}.bin")))
        self._sizes.write(little(lengths.astype(np.int32)))
        self._documents.write(little(self.sequences + np.cumsum(sequences_per_document, dtype=np.int64)))
        self.sequences += len(lengths)
        self.documents += len(sequences_per_document)

    def state(self) -> dict[str, Any]:
        """How far it is, once all of it is on disk."""
        logs = (self._tokens, self._sizes, self._documents)
        for log in logs:
            log.sync()
        counts = {"bytes": self._tokens.size, "sequences": self.sequences, "documents": self.documents}
        return {**counts, "digests": [log.digest() for log in logs]}

    def finalize(self) -> None:
        """Write the index and give both files their names; only now does the pair exist."""
        self.prepare()
        self.publish()

    def prepare(self) -> None:
        """Write the index, under a temporary name as well: the disk may be full."""
        self.state()
        index = _Log(self._names["idx"])
        index.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.documents + 1))
        for block in self._sizes.blocks():
            index.write(block)
        end = 0
        for block in self._sizes.blocks():
            ends = end + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
            index.write(little(np.concatenate([[end], ends[:-1]]).astype(np.int64)))
            end = int(ends[-1])
        index.write(little(np.zeros(1, np.int64)))
        for block in self._documents.blocks():
            index.write(block)
        index.sync()
        self.checksums = {"block": BLOCK, "bin": self._tokens.checksums(), "idx": index.checksums()}
        for log in (self._tokens, self._sizes, self._documents, index):
            log.close()

    def publish(self) -> None:
        """Give what is prepared its names."""
        # An old index must not stand next to new data, not even for a moment.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        os.replace(self._names["bin"], self.prefix + ".bin")
        os.replace(self._names["idx"], self.prefix + ".idx")
        for part in ("sizes", "documents"):
            Path(self._names[part]).unlink()

    def close(self) -> None:
        """Leave the temporary files for a writer that goes on."""
        for log in (self._tokens, self._sizes, self._documents):
            log.close()

    def abort(self) -> None:
        """Throw away what was written."""
        self.close()
        for name in self._names.values():
            Path(name).unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


class _Log:
    """A file that grows, with the SHA-256 of each full block of it.

    size: where to go on, if it exists. digest: what `digest()` said there. Raises ValueError if the file is not that.
    """

    def __init__(self, path: str, size: int | None = None, digest: str | None = None) -> None:
        if size is not None and os.path.getsize(path) < size:
            # Made longer it would hold zeros, which are tokens.
            raise ValueError(f"{path} has {os.path.getsize(path)} bytes, but {size} were written: it was cut short")
        self.path, self.size = path, size or 0
        self._position = 0  # bytes that the checksums cover
        self._file: BinaryIO = open(path, "r+b" if size is not None else "w+b")  # noqa: SIM115  # closed in close()
        self._file.truncate(self.size)
        self._done: list[str] = []
        self._digest = hashlib.sha256()
        if self.size:
            self._file.seek(0)
            for block in iter(lambda: self._file.read(AT_ONCE), b""):
                self._hash(block)
        if digest is not None and digest != self.digest():
            self.close()
            raise ValueError(f"{path} is not what was written (SHA-256 differs): it is damaged")

    def write(self, content: bytes) -> None:
        with naming(self.path):
            self._file.write(content)
        self.size += len(content)
        self._hash(content)

    def _hash(self, content: bytes) -> None:
        view, at = memoryview(content), self._position
        while view:
            take = min(len(view), BLOCK - at % BLOCK)
            self._digest.update(view[:take])
            view, at = view[take:], at + take
            if at % BLOCK == 0:
                self._done.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()
        self._position = at

    def checksums(self) -> list[str]:
        return [*self._done, self._digest.hexdigest()] if self._position % BLOCK else list(self._done)

    def digest(self) -> str:
        """One number for all checksums."""
        return hashlib.sha256("".join(self.checksums()).encode()).hexdigest()

    def sync(self) -> None:
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def blocks(self) -> Any:
        """The content from the front, some megabytes at a time."""
        self._file.seek(0)
        yield from iter(lambda: self._file.read(8 * AT_ONCE), b"")
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still to be written, on a full disk
            self._file.close()


def checksums_of(path: str) -> list[str]:
    """SHA-256 of each block of a file, as a writer's `checksums` has them."""
    found: list[str] = []
    with open(path, "rb") as file:
        while True:
            digest, left = hashlib.sha256(), BLOCK
            while left and (piece := file.read(min(left, AT_ONCE))):
                digest.update(piece)
                left -= len(piece)
            if left == BLOCK:
                return found
            found.append(digest.hexdigest())


def fit(ids: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """The ids in `dtype`. Raises ValueError for one that it cannot hold: a plain cast would wrap it."""
    if ids.dtype == dtype or not len(ids):
        return ids.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    low, high = int(ids.min()), int(ids.max())
    if low < limits.min or high > limits.max:
        raise ValueError(f"token id {low if low < limits.min else high} does not fit {dtype} in {where}")
    return ids.astype(dtype)


def little(array: NDArray[Any]) -> bytes:
    """Its bytes, little-endian on every machine."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

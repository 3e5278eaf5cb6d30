"""Writing of `.bin/.idx` pairs (format: indexed_dataset.py) in constant memory.

Tokens, sequence lengths and document boundaries are appended to three temporary files. At the end, the index is
assembled block by block from the lengths and boundaries. Then the file of tokens is renamed to .bin, and last the
index to .idx, so an .idx file proves that the pair is complete. A writer can save its state, and a later writer can
resume from this state.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron.atomic import name_in_errors, process_name
from megatron.data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION

Array = NDArray[Any]
BLOCK = 1 << 26  # bytes of a file per checksum
AT_ONCE = 1 << 23  # bytes read at once


class IndexedDatasetBuilder:
    """Writer of a `.bin/.idx` pair. As a context manager it deletes its temporary files after an error.

    suffix: suffix of the temporary files.
    state: state to resume from, which `state()` of an earlier writer to the same prefix returned. Data that was
    written after that call is discarded.
    Raises ValueError for ids that the dtype cannot hold, and for temporary files that do not match `state`.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: type[np.integer[Any]] | np.dtype[Any] = np.int32,
        suffix: str | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        suffix = suffix or f"{process_name()}.tmp"
        self._names = {part: f"{self.prefix}.{part}.{suffix}" for part in ("bin", "sizes", "documents", "idx")}
        self.sequences = 0
        self.documents = 0
        self.checksums: dict[str, Any] = {}
        sizes: Sequence[Any] = (None, None, None)
        digests: Sequence[Any] = (None, None, None)
        if state:
            self.sequences = state["sequences"]
            self.documents = state["documents"]
            # A length takes 4 bytes, the end of a document 8.
            sizes = (state["bytes"], 4 * self.sequences, 8 * self.documents)
            digests = state["digests"]
        # There are four names, but map() ends after three, with the shorter lists: the last file, that of the index, is
        # opened at the end.
        self._logs = list(map(_ChecksummedFile, self._names.values(), sizes, digests))
        self._tokens, self._sizes, self._documents = self._logs

    @property
    def num_tokens(self) -> int:
        """Number of tokens written so far."""
        return self._tokens.size // self.dtype.itemsize

    def add_document(self, ids: Sequence[int] | Array, lengths: Sequence[int] | None = None) -> None:
        """Append one document of one sequence, or of several sequences of the given lengths."""
        if lengths is None:
            lengths = [len(ids)]
        sizes = np.array(lengths, dtype=np.int64)
        self.add_batch(np.asarray(ids), sizes, np.array([len(sizes)]))

    def add_batch(self, ids: Array, lengths: Array, sequences_per_document: Array) -> None:
        """Append many documents at once.

        ids: concatenated tokens. lengths: tokens of each sequence. sequences_per_document: number of sequences
        of each document.
        """
        sequences = int(sequences_per_document.sum())
        if lengths.sum() != len(ids) or sequences != len(lengths):
            raise ValueError(
                "lengths do not sum to the number of tokens, or sequences_per_document to the number of lengths"
            )
        if len(lengths):
            longest = int(lengths.max())
            if longest > np.iinfo(np.int32).max or int(lengths.min()) < 0:
                raise ValueError(f"a sequence of {longest} tokens is too long for the format; split it")
        ends = self.sequences + np.cumsum(sequences_per_document, dtype=np.int64)
        stored_ids = cast_ids(ids, self.dtype, f"{self.prefix}.bin")
        self._tokens.write(little_endian_bytes(stored_ids))
        self._sizes.write(little_endian_bytes(lengths.astype(np.int32)))
        self._documents.write(little_endian_bytes(ends))
        self.sequences += sequences
        self.documents += len(sequences_per_document)

    def state(self) -> dict[str, Any]:
        """Flush everything to disk and return the state from which a later writer can resume."""
        for log in self._logs:
            log.sync()
        return {
            "bytes": self._tokens.size,
            "sequences": self.sequences,
            "documents": self.documents,
            "digests": [log.digest() for log in self._logs],
        }

    def finalize(self) -> None:
        """Write the index, then rename both temporary files to their final names."""
        self.prepare()
        self.publish()

    def prepare(self) -> None:
        """Write the index under a temporary name, so that a full disk causes an error before any file is renamed."""
        self.state()  # flushes all files to disk
        # The index: header, length of each sequence, first byte of each sequence, boundaries of the documents.
        index = _ChecksummedFile(self._names["idx"])
        header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], self.sequences, self.documents + 1)
        index.write(header)
        for block in self._sizes.blocks():
            index.write(block)
        end = 0
        for block in self._sizes.blocks():
            # Lengths 3, 1, 2 with 2 bytes a token from byte 10: sequences end at 16, 18, 22 and begin at 10, 16, 18.
            lengths = np.frombuffer(block, "<i4")
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            begins = np.concatenate([[end], ends[:-1]])
            index.write(little_endian_bytes(begins))
            end = int(ends[-1])
        # The index of documents begins with 0, an int64, so it has one entry more than there are documents.
        index.write(bytes(8))
        for block in self._documents.blocks():
            index.write(block)
        index.sync()
        self.checksums = {"block": BLOCK, "bin": self._tokens.checksums(), "idx": index.checksums()}
        self.close()
        index.close()

    def publish(self) -> None:
        """Rename the prepared files to their final names."""
        # An old .idx must never exist next to a new .bin.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for part in ("bin", "idx"):
            os.replace(self._names[part], f"{self.prefix}.{part}")
        for part in ("sizes", "documents"):
            Path(self._names[part]).unlink()

    def close(self) -> None:
        """Close the temporary files but keep them for a later writer, which resumes from them."""
        for log in self._logs:
            log.close()

    def abort(self) -> None:
        """Close and delete the temporary files."""
        self.close()
        for name in self._names.values():
            Path(name).unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


class _ChecksummedFile:
    """Append-only file with the SHA-256 of each full block.

    size: number of bytes of an existing file to keep; None creates a new file. digest: expected `digest()` of the
    kept bytes. Raises ValueError if the file is shorter than `size` or its digest differs.
    """

    def __init__(self, path: str, size: int | None = None, digest: str | None = None) -> None:
        mode = "w+b"
        if size is not None:
            mode = "r+b"
            actual_size = os.path.getsize(path)
            # truncate() would extend the file with zeros, which are valid tokens.
            if actual_size < size:
                raise ValueError(f"{path} has {actual_size} bytes, but {size} were written: it is truncated")
        self.path = path
        self.size = 0  # bytes of the file, all of which the checksums cover
        self._file: IO[bytes] = open(path, mode)  # noqa: SIM115  # closed in close()
        self._file.truncate(size or 0)  # discards what was written after the state was saved
        self._full_blocks: list[str] = []
        self._digest = hashlib.sha256()
        # The checksums continue from the kept bytes, so read them; a new file has none.
        for block in self.blocks():
            self._add_to_checksums(block)
        if digest is not None and digest != self.digest():
            self.close()
            raise ValueError(f"{path} is damaged: its SHA-256 differs from that of the data that was written")

    def write(self, content: bytes) -> None:
        with name_in_errors(self.path):
            self._file.write(content)
        self._add_to_checksums(content)

    def _add_to_checksums(self, content: bytes) -> None:
        """Count bytes of the file, and add them to the checksums, each of which covers BLOCK bytes."""
        view = memoryview(content)
        while view:
            # Up to the end of the block, whose checksum is then complete.
            count = min(len(view), BLOCK - self.size % BLOCK)
            self._digest.update(view[:count])
            view = view[count:]
            self.size += count
            if self.size % BLOCK == 0:
                self._full_blocks.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def checksums(self) -> list[str]:
        """Return the checksum of each block written so far, with that of the incomplete last block."""
        checksums = list(self._full_blocks)
        # The last block may be shorter than the others.
        if self.size % BLOCK:
            checksums.append(self._digest.hexdigest())
        return checksums

    def digest(self) -> str:
        """Return one hash over all block checksums."""
        return hashlib.sha256("".join(self.checksums()).encode()).hexdigest()

    def sync(self) -> None:
        with name_in_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def blocks(self) -> Any:
        """Yield the content from the start, 8 MiB at a time."""
        self._file.seek(0)
        yield from iter(lambda: self._file.read(AT_ONCE), b"")
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk, flushing the buffer fails
            self._file.close()


def cast_ids(ids: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Cast ids to `dtype`. Raises ValueError for an id that would overflow."""
    if len(ids) and ids.dtype != dtype:
        limits = np.iinfo(dtype)
        for extreme in (ids.min(), ids.max()):
            if not limits.min <= extreme <= limits.max:
                raise ValueError(f"token id {extreme} does not fit the dtype {dtype} of {where}")
    return ids.astype(dtype, copy=False)


def little_endian_bytes(array: Array) -> bytes:
    """Return the array's bytes in little-endian order on every machine."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()

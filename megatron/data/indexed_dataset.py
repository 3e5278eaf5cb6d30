"""Token sequences on disk: a `.bin` of concatenated tokens and an `.idx` with the offset of each sequence.

The format is Megatron's MMIDIDX version 1, byte for byte (little-endian):

    .idx   9 bytes   magic "MMIDIDX\\0\\0"
           uint64    version, 1
           uint8     dtype code
           uint64    S, number of sequences
           uint64    D, length of the document array (documents + 1)
           int32 x S tokens of each sequence
           int64 x S byte offset of each sequence in .bin
           int64 x D index of the first sequence of each document; 0 first, S last
    .bin   the tokens, no header, no padding

indexed_writer.py writes such pairs.
"""

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..storage import RemotePath, to_path
from .checked import reused_checks

if TYPE_CHECKING:
    from .remote_tokens import RemoteTokens

Stamp = tuple[int, str]  # size and version of an object in object storage
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16,
}  # fmt: skip
LOSS_SUFFIX = "_loss"  # PREFIX_loss.bin/.idx holds the loss mask of a fine-tuning corpus (sft_dataset.py)
DTYPE_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


class DatasetError(ValueError):
    """Error for a .bin/.idx pair that is missing, damaged or in another format; the message names the file."""


def best_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Return uint16 for a vocabulary of fewer than 65500 tokens, as Megatron does, else int32."""
    return np.uint16 if vocab_size < 65500 else np.int32


class IndexedDataset:
    """Read access to a `.bin/.idx` pair through memory maps; `dataset[i]` is sequence i.

    The prefix may be a URL in object storage. Then `tokens` is a `RemoteTokens`, which reads through a cache.
    sizes: number of tokens of each sequence, int32 [sequences]. document_index: index of the first sequence of each
    document, followed by the number of sequences, int64 [documents + 1]. dtype: dtype of the tokens.
    has_modes: whether the index has a mode byte for each sequence, as that of a multimodal corpus.
    orders_folder: folder for the files with the order of large epochs.
    Raises DatasetError if the two files do not match. Unpickling reopens the files. A returned array stays valid as
    long as it is referenced.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self._open(os.fspath(prefix), reused_checks())

    def _open(self, prefix: str, known_checks: dict[str, bool], stamp: Stamp | None = None) -> None:
        """Map both files; check the index unless `known_checks` has it. stamp: version of a remote .bin, if known."""
        self.prefix = prefix
        self.orders_folder = f"{prefix}.orders"
        self.tokens: NDArray[Any]  # `_map_tokens` or `open_tokens` sets it
        self._remote: RemoteTokens | None = None  # `open_tokens` sets this and the next attribute
        self._stamp: Stamp | None = None
        self._maps: list[tuple[str, Any, int]] = []  # path, memory map and size of each file when it was opened
        for path in (f"{prefix}.idx", f"{prefix}.bin"):
            if not to_path(path).is_file():
                raise DatasetError(f"there is no {path}; tools/preprocess_data.py writes the .bin and .idx of a corpus")
        token_file = to_path(f"{prefix}.bin")
        self._map_index()  # sets `sizes`, `pointers` and `document_index`
        if prefix not in known_checks:  # dict of `reuse_checks`: prefix -> True if each document is one sequence
            known_checks[prefix] = self._check_index(token_file)
        self._one_sequence_each = known_checks[prefix]
        if isinstance(token_file, RemotePath):
            from .remote_tokens import open_tokens

            open_tokens(self, token_file, stamp)
        else:
            self._map_tokens()
        self._versions = [os.stat(path) for path, *_ in self._maps]  # to detect other files after unpickling

    def _map_index(self) -> None:
        """Map the .idx file and its three arrays. Raises DatasetError if its size contradicts its header."""
        path = f"{self.prefix}.idx"
        self._local_index = path  # path on this machine; for object storage, that of a copy
        index_file = to_path(path)
        if isinstance(index_file, RemotePath):
            from .remote_tokens import local_copy

            self._local_index = os.fspath(local_copy(index_file))
        size = os.path.getsize(self._local_index)
        if size < HEADER.size:
            raise DatasetError(f"{path} is truncated: it has {size} bytes, fewer than its header of {HEADER.size}")
        mapped = np.memmap(self._local_index, mode="r", dtype=np.uint8)
        magic, version, code, num_sequences, document_entries = HEADER.unpack(mapped[: HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION or code not in DTYPES:
            raise DatasetError(f"{path} is not an integer index in Megatron's MMIDIDX format, version 1")
        expected = HEADER.size + 12 * num_sequences + 8 * document_entries  # a sequence: int32 size, int64 offset
        if size not in (expected, expected + num_sequences):  # multimodal index files add a mode byte per sequence
            raise DatasetError(f"{path} is damaged: it has {size} bytes, but its header implies {expected}")
        self.has_modes = size > expected
        self.dtype = np.dtype(DTYPES[code])
        # The three arrays follow the header without padding.
        offset = HEADER.size
        self.sizes: NDArray[np.int32] = np.frombuffer(mapped, np.int32, num_sequences, offset)
        offset += self.sizes.nbytes
        self.pointers: NDArray[np.int64] = np.frombuffer(mapped, np.int64, num_sequences, offset)
        offset += self.pointers.nbytes
        self.document_index: NDArray[np.int64] = np.frombuffer(mapped, np.int64, document_entries, offset)
        if self._local_index == path:  # not a copy of an index in object storage
            self._maps.append((path, mapped.base, size))  # for check_not_shrunk; `base` is the mmap object

    def _map_tokens(self) -> None:
        """Map the .bin file. numpy closes the map when no array refers to it, so this class needs no close()."""
        path = f"{self.prefix}.bin"
        if os.path.getsize(path) == 0:
            self.tokens = np.empty(0, self.dtype)
            return
        mapped = np.memmap(path, mode="r", dtype=self.dtype)
        self.tokens = mapped.view(np.ndarray)  # slicing an np.memmap is slow
        self._maps.append((path, mapped.base, mapped.nbytes))  # for check_not_shrunk

    def refresh(self) -> None:
        """Let `tokens` follow the cache of a corpus in object storage; see `RemoteTokens.refresh`."""
        if self._remote is not None:
            self.tokens = cast(NDArray[Any], self._remote.refresh())

    def check_not_shrunk(self) -> None:
        """Raise DatasetError if a file has become shorter since it was mapped: reading its end would kill the process.

        Call this before a read. A file that was deleted stays readable.
        """
        for path, mapped, expected_size in self._maps:
            current_size = mapped.size()  # mmap.size() returns the size of the file, not of the map
            if current_size < expected_size:
                raise DatasetError(
                    f"{path} has become shorter: it had {expected_size} bytes when it was opened and has "
                    f"{current_size} now; copy it again, and do not change the files of a corpus that a run reads"
                )

    def _check_index(self, token_file: Path) -> bool:
        """Check the index against the .bin file; return whether every document is one sequence. Raises DatasetError."""
        from .index_check import check_order, check_sizes

        check_sizes(self, token_file)
        return check_order(self, self._local_index)

    def __getstate__(self) -> tuple[str, bool, Stamp | None, list[os.stat_result]]:
        return self.prefix, self._one_sequence_each, self._stamp, self._versions

    def __setstate__(self, state: tuple[str, bool, Stamp | None, list[os.stat_result]]) -> None:
        """Reopen the files in another process, without the check, which the process that pickled has made."""
        prefix, one_sequence_each, stamp, versions = state
        self._open(prefix, {prefix: one_sequence_each}, stamp)
        from .index_check import refuse_other_files

        refuse_other_files(self._maps, versions, self._versions)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_index) - 1

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return len(self.tokens)

    def __getitem__(self, i: int | np.integer[Any]) -> NDArray[Any]:
        return self.get(i)

    def get(self, i: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return tokens `offset` to `offset + length` - 1 of sequence i, by default to its end, as a view of the file.

        A negative i counts from the last sequence. Raises IndexError if the range exceeds the sequence.
        """
        i = int(i)
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} does not exist: {self.prefix} has {len(self)} sequences")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"tokens {offset} to {offset + length} exceed sequence {i} of {self.prefix}, which has {size} tokens"
            )
        start = int(self.pointers[i]) // self.dtype.itemsize + offset  # index in `tokens`; pointers are in bytes
        return self.tokens[start : start + length]

    def document_start(self, document: int) -> int:
        """Return the index in `tokens` of the first token of a document, which must not be empty."""
        # If every document is one sequence, document 7 is sequence 7, without a read of `document_index`.
        sequence = document if self._one_sequence_each else self.document_index.item(document)
        return self.pointers.item(sequence) // self.dtype.itemsize

    def document_sizes(self, documents: range) -> NDArray[np.integer[Any]]:
        """Return the number of tokens of each document in the range, [documents].

        The result is a view of the memory map if every document is one sequence.
        """
        if self._one_sequence_each:
            return self.sizes[documents.start : documents.stop]
        # Example: the first document has sequences 5 and 6, of 3 and 4 tokens, and the second sequence 7, of 2 tokens.
        bounds = self.document_index[documents.start : documents.stop + 1]  # 5 7 8
        sequence_sizes = self.sizes[bounds[0] : bounds[-1]]  # 3 4 2
        ends = np.concatenate([[0], np.cumsum(sequence_sizes, dtype=np.int64)])  # 0 3 7 9
        # Entries 0 2 3 of `ends` are 0 7 9, so 7 2.
        return np.diff(ends[bounds - bounds[0]])  # type: ignore[no-any-return]

    def document_ends(self) -> NDArray[np.int64]:
        """Return the cumulative number of tokens up to the end of each document, [documents]."""
        # Sequences of 3, 4 and 2 tokens have the ends 0 3 7 9; documents of 2 and 1 sequences end at entries 2 and 3.
        ends = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        return ends[self.document_index[1:]]

"""Checks of a corpus: its token ids, and its index against its .bin file, once by one process (`reuse_checks`)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .indexed_dataset import HEADER, DatasetError, IndexedDataset
from .pages import release_pages

CHECKED_IDS = 1_000_000  # number of token ids that are checked at the start and at the end of a corpus
ENTRIES_AT_ONCE = 1 << 18  # number of index entries that are read and checked at a time


def check_sizes(indexed: IndexedDataset, data: Path) -> None:
    """Raise DatasetError if the .bin file or the documents have another size than the sequences."""
    prefix = indexed.prefix
    required = int(indexed.sizes.sum(dtype=np.int64)) * indexed.dtype.itemsize
    size = data.stat().st_size
    if size != required:
        raise DatasetError(f"{prefix}.bin has {size} bytes, but {prefix}.idx requires {required}")
    documents = indexed.document_index
    if not len(documents) or documents[0] != 0 or documents[-1] != len(indexed):
        raise DatasetError(f"{prefix}.idx is damaged: its documents do not cover its {len(indexed)} sequences")


def check_order(indexed: IndexedDataset, index: str) -> bool:
    """Return whether each document is one sequence.

    Raises DatasetError for an index whose sequences or documents are out of order, as it would silently give wrong
    tokens later. The check reads the offsets from the file because pages of the memory map would count as memory of
    this process.
    index: path of the .idx file on this machine.
    """
    prefix = indexed.prefix
    sequences = len(indexed)
    documents = len(indexed.document_index)
    pointers_offset = HEADER.size + 4 * sequences  # after the sizes, int32
    documents_offset = pointers_offset + 8 * sequences  # after the pointers, int64
    begin = 0  # byte of the .bin file at which the next sequence must begin
    one_sequence_each = True
    # Each round checks the same range of entries of both tables. The shorter table ends in an earlier round; after
    # that, its arrays are empty, which passes all checks.
    for first_entry in range(0, max(sequences, documents), ENTRIES_AT_ONCE):
        # Sequences: each must begin where the one before it ends. With begin 0, sizes of 3 and 2 tokens and 2 bytes a
        # token, `bounds` is 0 6 10 and the pointers must be 0 and 6.
        sizes = indexed.sizes[first_entry : first_entry + ENTRIES_AT_ONCE]
        pointers = _read_int64(index, pointers_offset + 8 * first_entry, len(sizes))
        ends = begin + np.cumsum(sizes, dtype=np.int64) * indexed.dtype.itemsize
        bounds = np.concatenate([[begin], ends])
        is_consecutive = pointers == bounds[:-1]
        if (sizes < 0).any() or not is_consecutive.all():
            raise DatasetError(f"{prefix}.idx is damaged: its sequences are not consecutive in the .bin")
        begin = int(bounds[-1])
        # Documents: entries 0 2 3 give two documents of 2 and 1 sequences, so one entry more than documents is read. If
        # the entries have ended before this range, `entries` is negative, and nothing is read.
        entries = min(ENTRIES_AT_ONCE + 1, documents - first_entry)
        counts = np.diff(_read_int64(index, documents_offset + 8 * first_entry, entries))
        if (counts < 0).any():
            raise DatasetError(f"{prefix}.idx is damaged: a document ends before it begins")
        one_sequence_each &= bool((counts == 1).all())
    release_pages(indexed.sizes)
    return one_sequence_each


def _read_int64(path: str, offset: int, count: int) -> NDArray[Any]:
    return np.fromfile(path, "<i8", max(count, 0), offset=offset)


def open_corpus(prefix: str, vocab_size: int | None) -> IndexedDataset:
    """Open a `.bin/.idx` pair and check the token ids at the start and the end of the .bin file.

    Raises DatasetError if the pair is damaged or empty, or if one of these ids is outside the vocabulary.
    """
    indexed = IndexedDataset(prefix)
    if not indexed.num_tokens:
        raise DatasetError(f"{prefix}.bin contains no tokens; preprocess the text again")
    check_ids(indexed, vocab_size)
    return indexed


def check_ids(indexed: IndexedDataset, vocab_size: int | None) -> None:
    """Raise DatasetError if one of the first or last million token ids of the corpus is outside the vocabulary.

    Such ids show that the corpus is damaged or was made with another tokenizer.
    """
    if vocab_size is None:
        return
    # The start and the end of the corpus, which overlap in a small one.
    for first in (0, max(0, len(indexed.tokens) - CHECKED_IDS)):
        ids = indexed.tokens[first : first + CHECKED_IDS]
        if ids.min() >= 0 and ids.max() < vocab_size:
            continue
        bad_index = np.argmax((ids < 0) | (ids >= vocab_size))
        # The document is the first one that ends after the token; document_ends() has the ends of all documents.
        document = np.searchsorted(indexed.document_ends(), first + bad_index, side="right")
        where = f"token {first + bad_index:,}, in document {document:,}"
        raise DatasetError(
            f"{indexed.prefix}.bin contains token id {ids[bad_index]} ({where}), outside the vocabulary of "
            f"{vocab_size} tokens: the file is damaged or was made with another tokenizer; preprocess the text again "
            "or pass the --vocab-file of the corpus"
        )


def refuse_other_files(
    maps: Sequence[tuple[str, Any, int]], old: Sequence[os.stat_result], new: Sequence[os.stat_result]
) -> None:
    """Raise DatasetError if this process has opened another file than the process that pickled the data set.

    maps: path, map and size of each file. old: status of each file when the data set was pickled. new: status of the
    file that this process has opened.
    """
    for (path, *_), before, now in zip(maps, old, new, strict=True):
        # The time alone changes by `touch`, and the inode alone when a network file system forgets it.
        is_replaced = now.st_ino != before.st_ino and now.st_mtime_ns != before.st_mtime_ns
        has_other_size = now.st_size != before.st_size
        if is_replaced or has_other_size:
            raise DatasetError(f"{path} is another file than the run has opened; restore it, and start again")

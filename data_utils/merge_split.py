"""Merging, splitting and filtering `.bin/.idx` pairs by copying byte ranges, in constant memory."""

import re
from collections.abc import Sequence

import numpy as np

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.pages import document_ranges

TOKENS_AT_ONCE = 1 << 22  # tokens copied at once


def write_pair(prefixes: Sequence[str], output: str, ranges: Sequence[range] = ()) -> IndexedDatasetBuilder:
    """Write a pair with the documents of one or several pairs, in order; return its writer.

    ranges: the documents to take from each pair; all documents by default.
    Raises DatasetError if the dtypes of the pairs differ.
    """
    opened = list(map(IndexedDataset, prefixes))
    first = opened[0]
    for each in opened[1:]:
        if each.dtype != first.dtype:
            raise DatasetError(
                f"{each.prefix}.bin contains {each.dtype}, but {first.prefix}.bin contains {first.dtype}; "
                f"preprocess one of the two corpora again"
            )
    with IndexedDatasetBuilder(output, first.dtype) as builder:
        for each in opened:
            for documents in ranges or [range(each.num_documents)]:
                copy(each, documents, builder)
    return builder


def ranges_without(prefix: str, words: Sequence[str]) -> list[range]:
    """Return the ranges of documents of the pair `prefix` that remain without some documents.

    words: document numbers such as `17`, and ranges such as `20-31`.
    Raises DatasetError if a word has another form, if the pair lacks such a document, or if it has no other.
    """
    kept = np.ones(IndexedDataset(prefix).num_documents, bool)
    for word in words:
        first = last = -1  # for a word of another form, which the next check rejects
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", word)
        if match:
            first = int(match[1])
            last = int(match[2] or first)  # 17 means 17-17
        if not 0 <= first <= last < len(kept):
            raise DatasetError(f"{word} is none of the documents 0 to {len(kept) - 1} of {prefix}, as in 17 or 20-31")
        kept[first : last + 1] = False
    if not kept.any():
        raise DatasetError(f"{prefix} has no document besides those to drop; drop fewer documents")
    # kept = [1, 0, 0, 1, 1] changes before documents 0, 1, 3 and 5, so the ranges to copy are 0 to 0 and 3 to 4.
    changes = np.flatnonzero(np.diff(kept, prepend=False, append=False))
    return [range(begin, end) for begin, end in changes.reshape(-1, 2).tolist()]


def copy(indexed: IndexedDataset, documents: range, builder: IndexedDatasetBuilder) -> None:
    """Append `documents` of the corpus `indexed` to `builder`, a few million tokens at a time.

    Raises DatasetError for a multimodal corpus, because a writer writes no modes.
    """
    if indexed.has_modes:
        raise DatasetError(f"{indexed.prefix}.idx has modes of multimodal sequences, which would be lost")
    for part in document_ranges(indexed, documents, TOKENS_AT_ONCE):
        # Number of the first sequence of each document and, at the end, of the document after the part.
        index = indexed.document_index[part.start : part.stop + 1]
        first = int(index[0])
        sizes = indexed.sizes[first : int(index[-1])]  # tokens of each sequence
        total = int(sizes.sum(dtype=np.int64))
        begin = 0  # the first token
        if total:  # a part without tokens may have no sequence to look up
            begin = int(indexed.pointers[first]) // indexed.dtype.itemsize  # pointers are in bytes
        tokens = indexed.tokens[begin : begin + total]
        builder.add_batch(tokens, sizes, np.diff(index))

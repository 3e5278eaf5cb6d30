"""Dataset for supervised fine-tuning: packs whole conversations into windows, with loss on answers only.

The conversations (records) of a window do not attend to each other. A corpus has two pairs of files:
PREFIX.bin/.idx with the tokens, and PREFIX_loss.bin/.idx with uint8 loss masks (1: the token counts in the loss).
A record of L tokens occupies L - 1 positions because its last token is only a target.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .corpora import DatasetFactory, build_datasets
from .corpus_dataset import CorpusDataset
from .corpus_paths import Paths
from .index_check import open_corpus
from .indexed_dataset import LOSS_SUFFIX, DatasetError, IndexedDataset
from .packing import Ints, PackedOrder
from .pages import document_ranges

MASK_TOKENS_AT_ONCE = 1 << 20  # number of tokens whose loss mask is read at a time


class Records:
    """Fine-tuning corpus: a `.bin/.idx` pair with tokens and a pair with loss masks.

    Raises DatasetError if a pair is missing or damaged, or if the two pairs do not match.
    """

    def __init__(self, prefix: str, vocab_size: int | None) -> None:
        self.tokens = open_corpus(prefix, vocab_size)
        self.prefix = prefix
        self.vocab_size = vocab_size
        try:
            self.loss_flags = IndexedDataset(prefix + LOSS_SUFFIX)
        except DatasetError as error:
            raise DatasetError(
                f"--objective sft needs a corpus from tools/preprocess_data.py --objective sft: {error}"
            ) from None
        if self.loss_flags.dtype != np.uint8 or not _have_equal_documents(self.loss_flags, self.tokens):
            raise DatasetError(
                f"{prefix}{LOSS_SUFFIX}.bin is not a loss mask for {prefix}.bin; preprocess the corpus again"
            )

    def count_targets(self, documents: range, max_tokens: int) -> Ints:
        """Return the number of targets among the first `max_tokens` tokens of each document, [documents].

        A target is a token that counts in the loss. The first token of a document is never a target.
        """
        counts = np.zeros(len(documents), dtype=np.int64)
        for run in document_ranges(self.tokens, documents, MASK_TOKENS_AT_ONCE):
            sizes = self.tokens.document_sizes(run).astype(np.int64)
            if not sizes.sum():
                continue
            # document_start() needs a document with tokens, so take the first such document of the run.
            begin = self.tokens.document_start(run[int(np.flatnonzero(sizes)[0])])
            flags = self.loss_flags.tokens[begin : begin + int(sizes.sum())]
            if flags.max() > 1:
                raise DatasetError(
                    f"{self.prefix}{LOSS_SUFFIX}.bin is damaged: "
                    f"a loss mask contains {flags.max()}, which is neither 0 nor 1"
                )
            # Flags 0 1 1 0 1 give 0 0 1 2 2 3 targets before each token. Documents of 3 and 2 tokens have the starts 0
            # 3 and the ends 3 5, so the targets after their first tokens are 2 - 0 = 2 and 3 - 2 = 1.
            targets_before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
            starts = np.cumsum(sizes) - sizes
            ends = starts + np.minimum(sizes, max_tokens)
            after_first_token = np.minimum(starts + 1, ends)  # a document without tokens has no first one
            first = run.start - documents.start  # index of the run's first document in `counts`
            counts[first : first + len(run)] = targets_before[ends] - targets_before[after_first_token]
            self.loss_flags.refresh()
        return counts


def _have_equal_documents(a: IndexedDataset, b: IndexedDataset) -> bool:
    """Return whether both pairs have as many documents, of the same lengths."""
    all_documents = range(a.num_documents)
    if b.num_documents != a.num_documents:
        return False
    return np.array_equal(a.document_sizes(all_documents), b.document_sizes(all_documents))


class SftDataset(CorpusDataset):
    """Dataset of packed records; a sample is a dict of int64 tensors [seq_length].

    Sample n, for any n >= 0, depends only on the corpus, `documents`, `part`, `seed` and n. Its tensors are:
    tokens, labels: token ids, padded with `eod`. loss_mask: 1 where a label counts in the loss, else 0.
    document_ids: number of the record in the window, starting at 1; 0 for padding.

    A record of more than seq_length + 1 tokens is truncated. A record without a token that counts in the loss is
    skipped. The attributes `num_truncated`, `num_skipped` and `records` are the numbers of truncated, skipped and all
    records.
    Raises ValueError if all records are skipped.
    """

    order: PackedOrder

    def __init__(self, records: Records, documents: range, seq_length: int, eod: int, seed: int, part: str) -> None:
        self._corpus = records
        self.documents = documents
        self.seq_length = seq_length
        self._eod = eod
        sizes = records.tokens.document_sizes(documents).astype(np.int64)
        has_targets = records.count_targets(documents, seq_length + 1) > 0
        self.num_truncated = int((has_targets & (sizes > seq_length + 1)).sum())
        self.num_skipped = int((~has_targets).sum())
        self.records = len(documents)
        # The last token of a record is only a target, so it takes no position; length 0 skips a record.
        lengths = np.where(has_targets, np.minimum(sizes, seq_length + 1) - 1, 0)
        self.order = PackedOrder(lengths, seq_length, seed, f"{part} records")

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        length = self.seq_length
        sample = {
            "tokens": np.full(length, self._eod, dtype=np.int64),
            "labels": np.full(length, self._eod, dtype=np.int64),
            "loss_mask": np.zeros(length, dtype=np.int64),
            "document_ids": np.zeros(length, dtype=np.int64),
        }
        text = self._corpus.tokens
        loss_flags = self._corpus.loss_flags
        text.check_not_shrunk()
        loss_flags.check_not_shrunk()
        limit = self._corpus.vocab_size  # None if it is unknown
        filled = 0  # positions of the window that have a token
        records = self.order.records(int(n)).tolist()
        self.refresh_after(len(records), (text, loss_flags))
        for number, record in enumerate(records, start=1):
            document = self.documents[record]
            start = text.document_start(document)
            size = int(text.document_sizes(range(document, document + 1))[0])
            source = slice(start, start + min(size, length + 1))
            ids = text.tokens[source]
            if limit is not None and (ids.max() >= limit or ids.min() < 0):
                raise DatasetError(
                    f"document {document} of {self._corpus.prefix}.bin contains a token id outside the vocabulary of "
                    f"{limit} tokens: the file is damaged or was made with another tokenizer"
                )
            # The record A B C D takes three positions: the tokens A B C with the labels B C D.
            positions = slice(filled, filled + len(ids) - 1)
            sample["tokens"][positions] = ids[:-1]
            sample["labels"][positions] = ids[1:]
            sample["loss_mask"][positions] = loss_flags.tokens[source][1:]
            sample["document_ids"][positions] = number
            filled = positions.stop
        return {name: torch.from_numpy(each) for name, each in sample.items()}

    def summary(self) -> str:
        """Return a summary: the numbers of used, truncated and skipped records, and how full the windows are."""
        truncated = skipped = ""
        if self.num_truncated:
            truncated = f", {self.num_truncated} of them truncated to {self.seq_length + 1} tokens"
        if self.num_skipped:
            skipped = f"; {self.num_skipped} skipped, as none of their tokens within --seq-length counts in the loss"
        return (
            f"{self.records - self.num_skipped} records{truncated}, in {self.order.per_epoch} windows that are "
            f"{self.order.fill_fraction:.1%} full{skipped}"
        )


def build_train_valid_test_datasets(
    data_path: Paths, split: str, seq_length: int, eod: int, seed: int, vocab_size: int | None = None
) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes) of one or several fine-tuning corpora.

    The notes report truncated and skipped records, how full the windows are, and empty datasets.
    Raises DatasetError if a corpus is damaged, or if no training record has a token that counts in the loss.
    """
    summaries = list[str]()

    def open_records(prefix: str) -> tuple[int, DatasetFactory]:
        records = Records(prefix, vocab_size)

        def make(documents: range, part: str) -> SftDataset:
            dataset = SftDataset(records, documents, seq_length, eod, seed, part)
            summaries.append(f"the {part} part of {prefix}: {dataset.summary()}")
            return dataset

        return records.tokens.num_documents, make

    datasets, notes = build_datasets(open_records, data_path, split)
    return datasets, [*summaries, *notes]

"""Dataset for supervised fine-tuning: packs whole conversations into windows, with loss on answers only.

The conversations (records) of a window do not attend to each other. A corpus has two pairs of files:
PREFIX.bin/.idx with the tokens, and PREFIX_loss.bin/.idx with uint8 loss masks (1: the token counts in the loss).
A record of L tokens occupies L - 1 positions because its last token is only a target.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .corpora import Make, Paths, build_datasets
from .corpus_dataset import CorpusDataset
from .index_check import open_corpus
from .indexed_dataset import LOSS, DatasetError, IndexedDataset
from .packing import Ints, PackedOrder
from .pages import runs_of

AT_ONCE = 1 << 20  # number of tokens whose loss mask is read at a time


class Records:
    """Fine-tuning corpus: a `.bin/.idx` pair with tokens and a pair with loss masks.

    Raises DatasetError if a pair is missing or damaged, or if the two pairs do not match.
    """

    def __init__(self, prefix: str, vocab_size: int | None) -> None:
        self.tokens = open_corpus(prefix, vocab_size)
        self.prefix = prefix
        self.vocab_size = vocab_size
        try:
            self.counts = IndexedDataset(prefix + LOSS)
        except DatasetError as error:
            raise DatasetError(
                f"--objective sft needs a corpus from tools/preprocess_data.py --objective sft: {error}"
            ) from None
        if self.counts.dtype != np.uint8 or not _have_one_shape(self.counts, self.tokens):
            raise DatasetError(f"{prefix}{LOSS}.bin is not a loss mask for {prefix}.bin; preprocess the corpus again")

    def targets(self, documents: range, longest: int) -> Ints:
        """Return the number of targets among the first `longest` tokens of each document, [documents].

        A target is a token that counts in the loss. The first token of a document is never a target.
        """
        found = np.zeros(len(documents), dtype=np.int64)
        for some in runs_of(self.tokens, documents, AT_ONCE):
            sizes = self.tokens.document_sizes(some).astype(np.int64)
            if not sizes.sum():
                continue
            begin = self.tokens.document_start(some[int(np.flatnonzero(sizes)[0])])
            flags = self.counts.tokens[begin : begin + int(sizes.sum())]
            if flags.max() > 1:
                raise DatasetError(
                    f"{self.prefix}{LOSS}.bin is damaged: a loss mask contains {flags.max()}, which is neither 0 nor 1"
                )
            before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
            starts = np.cumsum(sizes) - sizes
            ends = starts + np.minimum(sizes, longest)
            at = some.start - documents.start
            found[at : at + len(some)] = before[ends] - before[np.minimum(starts + 1, ends)]
        return found


def _have_one_shape(a: IndexedDataset, b: IndexedDataset) -> bool:
    """Return whether both pairs have as many documents, of the same lengths."""
    every = range(a.num_documents)
    return b.num_documents == len(every) and np.array_equal(a.document_sizes(every), b.document_sizes(every))


class SftDataset(CorpusDataset):
    """Dataset of packed records; a sample is a dict of int64 tensors [seq_length].

    Sample n, for any n >= 0, depends only on the corpus, `documents`, `part`, `seed` and n. Its tensors are:
    tokens, labels: token ids, padded with `eod`. loss_mask: 1 where a label counts in the loss, else 0.
    document_ids: number of the record in the window, starting at 1; 0 for padding.

    A record of more than seq_length + 1 tokens is truncated. A record without a token that counts in the loss is
    skipped. Attributes: `cut`, `left_out` and `records` are the numbers of truncated, skipped and all records.
    Raises ValueError if all records are skipped.
    """

    order: PackedOrder

    def __init__(self, records: Records, documents: range, seq_length: int, eod: int, seed: int, part: str) -> None:
        self._records = records
        self.documents = documents
        self.seq_length = seq_length
        self._eod = eod
        sizes = records.tokens.document_sizes(documents).astype(np.int64)
        learned = records.targets(documents, seq_length + 1) > 0
        self.cut = int((learned & (sizes > seq_length + 1)).sum())
        self.left_out = int((~learned).sum())
        self.records = len(documents)
        lengths = np.where(learned, np.minimum(sizes, seq_length + 1) - 1, 0)
        self.order = PackedOrder(lengths, seq_length, seed, f"{part} records")

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        sample = {name: np.full(self.seq_length, self._eod, dtype=np.int64) for name in ("tokens", "labels")}
        sample |= {name: np.zeros(self.seq_length, dtype=np.int64) for name in ("loss_mask", "document_ids")}
        pair = self._records
        pair.tokens.refuse_shrunk()
        pair.counts.refuse_shrunk()
        at = 0
        for number, record in enumerate(self.order.records(int(n)).tolist(), start=1):
            document = self.documents[record]
            start = pair.tokens.document_start(document)
            size = int(pair.tokens.document_sizes(range(document, document + 1))[0])
            whole = slice(start, start + min(size, self.seq_length + 1))
            ids = pair.tokens.tokens[whole]
            self._check(ids, document)
            here = slice(at, at + len(ids) - 1)
            sample["tokens"][here] = ids[:-1]
            sample["labels"][here] = ids[1:]
            sample["loss_mask"][here] = pair.counts.tokens[whole][1:]
            sample["document_ids"][here] = number
            at = here.stop
        return {name: torch.from_numpy(each) for name, each in sample.items()}

    def _check(self, ids: np.ndarray, document: int) -> None:
        limit = self._records.vocab_size
        if limit is not None and (int(ids.max()) >= limit or int(ids.min()) < 0):
            raise DatasetError(
                f"document {document} of {self._records.prefix}.bin contains a token id outside the vocabulary of "
                f"{limit} tokens: the file is damaged or was made with another tokenizer"
            )

    def note(self) -> str:
        """Return a summary: the numbers of used, truncated and skipped records, and how full the windows are."""
        cut = left = ""
        if self.cut:
            cut = f", {self.cut} of them truncated to {self.seq_length + 1} tokens"
        if self.left_out:
            left = f"; {self.left_out} skipped, as none of their tokens within --seq-length counts in the loss"
        return (
            f"{self.records - self.left_out} records{cut}, in {self.order.per_epoch} windows that are "
            f"{self.order.filled:.1%} full{left}"
        )


def build_train_valid_test_datasets(
    data_path: Paths, split: str, seq_length: int, eod: int, seed: int, vocab_size: int | None = None
) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes) of one or several fine-tuning corpora.

    The notes report truncated and skipped records, how full the windows are, and empty datasets.
    Raises DatasetError if a corpus is damaged, or if no training record has a token that counts in the loss.
    """
    made: list[str] = []

    def open_(prefix: str) -> tuple[int, Make]:
        records = Records(prefix, vocab_size)

        def make(documents: range, part: str) -> SftDataset:
            dataset = SftDataset(records, documents, seq_length, eod, seed, part)
            made.append(f"the {part} part of {prefix}: {dataset.note()}")
            return dataset

        return records.tokens.num_documents, make

    datasets, notes = build_datasets(open_, data_path, split)
    return datasets, [*made, *notes]

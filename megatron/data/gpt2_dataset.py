"""Samples for a left-to-right language model: seq_length + 1 tokens cut from documents laid end to end."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .indexed_dataset import DatasetError, IndexedDataset
from .splits import build_parts
from .windows import Windows


class GPT2Dataset(Dataset[dict[str, Tensor]]):
    """`dataset[n]` is `{"text": int64 [seq_length + 1]}`, a pure function of (corpus, part, seed, n), for any n >= 0.

    The last token of a sample is the first of the sample behind it in the text, so that every
    token is once a target.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, seq_length: int, seed: int, part: str) -> None:
        self.windows = Windows(indexed, documents, seq_length, seed, part)
        self.order = self.windows.order

    @property
    def samples_per_epoch(self) -> int:
        return self.order.per_epoch

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        text, _ = self.windows.read(int(n))
        return {"text": torch.from_numpy(text)}


def build_train_valid_test_datasets(
    data_path: str, split: str, seq_length: int, seed: int, vocab_size: int | None = None
) -> tuple[tuple[GPT2Dataset | None, GPT2Dataset | None, GPT2Dataset | None], list[str]]:
    """The three datasets of a `.bin/.idx` pair, and notes on the parts that stayed empty.

    Raises DatasetError if the pair is damaged, holds ids outside the vocabulary, or the training
    part does not fill a sample.
    """
    indexed = IndexedDataset(data_path)
    if not indexed.num_tokens:
        raise DatasetError(f"{data_path}.bin holds no tokens")
    check_ids(indexed, vocab_size)

    def make(documents: range, part: str) -> GPT2Dataset:
        return GPT2Dataset(indexed, documents, seq_length, seed, part)

    return build_parts(make, data_path, split, indexed.num_documents)


def check_ids(indexed: IndexedDataset, vocab_size: int | None, at_most: int = 10_000_000) -> None:
    """Look for ids outside the vocabulary in the head and tail of the corpus: the mark of another tokenizer."""
    if vocab_size is None:
        return
    for piece in (indexed.tokens[:at_most], indexed.tokens[-at_most:]):
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= vocab_size:
            bad = high if high >= vocab_size else low
            raise DatasetError(
                f"{indexed.prefix}.bin holds token id {bad}, outside the vocabulary of {vocab_size}: it was made with "
                f"another tokenizer; preprocess the text again or give its --vocab-file"
            )

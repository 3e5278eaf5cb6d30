"""Dataset for a left-to-right language model: a sample is seq_length + 1 tokens of the concatenated documents."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .corpora import DatasetFactory, build_datasets
from .corpus_dataset import CorpusDataset
from .corpus_paths import Paths
from .index_check import open_corpus
from .indexed_dataset import IndexedDataset
from .sample_order import Windows

if TYPE_CHECKING:
    from .fim import FillInTheMiddle
    from .prefixes import Prefixes


class GPT2Dataset(CorpusDataset):
    """Dataset of samples `{"text": int64 [seq_length + 1]}`.

    Sample n, for any n >= 0, depends only on the corpus, `documents`, `part`, `seed` and n. Samples that are adjacent
    in the text overlap by one token, so every token is a target once per epoch.
    part: "train", "valid" or "test"; it also enters the random seed. fim: fill-in-the-middle settings.
    prefixes: prefix-LM settings; samples then also have `"prefixes": int64 [seq_length]`, 1 for tokens of a prefix.
    Reading a sample with an id outside the vocabulary raises DatasetError.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        part: str,
        vocab_size: int | None = None,
        fim: "FillInTheMiddle | None" = None,
        prefixes: "Prefixes | None" = None,
    ) -> None:
        self.fim = fim
        self.prefixes = prefixes
        self.seq_length = seq_length
        if fim or prefixes:  # else samples have no random choices, and `seed` stays ()
            # Words that select random streams, "gaps" for fill-in-the-middle. Other words would change the samples.
            stream = "prefixes" if prefixes else "gaps"
            self.seed = [seed, *f"{part} {stream}".encode()]  # numpy seeds a generator with a list of integers
        self.windows = Windows(indexed, documents, seq_length, seed, part, vocab_size=vocab_size)
        self.order = self.windows.order
        self.documents = documents

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        """Return sample n, with the keys that the class describes."""
        n = int(n)  # callers may pass an integer of numpy or torch
        tokens, document_sizes = self.windows.read(n)
        sample_seed = [*self.seed, n]  # unused without fill-in-the-middle and prefixes
        if self.fim:
            tokens = self.fim.rearrange_window(tokens, document_sizes, sample_seed)
        sample = {"text": torch.from_numpy(tokens)}
        if self.prefixes:
            prefix_mask = self.prefixes.draw_mask(tokens[:-1], sample_seed)  # the last token is only a label
            sample["prefixes"] = torch.from_numpy(prefix_mask)
        return sample


def build_train_valid_test_datasets(
    data_path: Paths,
    split: str,
    seq_length: int,
    seed: int,
    vocab_size: int | None = None,
    fim: "FillInTheMiddle | None" = None,
    prefixes: "Prefixes | None" = None,
) -> tuple[tuple[Any, Any, Any], list[str]]:
    """Return ((training, validation, test) datasets, notes on empty datasets) of one or several `.bin/.idx` pairs.

    Raises DatasetError if a pair is damaged, if a pair has ids outside the vocabulary, or if the training documents
    do not fill a sample.
    """

    def open_pair(prefix: str) -> tuple[int, DatasetFactory]:
        """Return the number of documents of a corpus, and a function that makes a dataset of some of them."""
        indexed = open_corpus(prefix, vocab_size)

        def make(documents: range, part: str) -> GPT2Dataset:
            return GPT2Dataset(indexed, documents, seq_length, seed, part, vocab_size, fim, prefixes)

        return indexed.num_documents, make

    return build_datasets(open_pair, data_path, split)

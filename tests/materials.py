"""A small tokenizer and a small random corpus for tests, the same in every run."""

from pathlib import Path

import numpy as np

from data_utils.documents import read_texts
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_sentencepiece
from megatron.tokenizer import load_tokenizer

from .support import ROOT

SAMPLE = ROOT / "corpus" / "sample.jsonl"


def small_tokenizer(folder: Path) -> str:
    """Train a sentencepiece tokenizer of 3000 tokens on the bundled corpus; return its path."""
    path = str(folder / "tokenizer.model")
    train_sentencepiece(read_texts([str(SAMPLE)]), path, 3000)
    return path


def random_corpus(folder: Path, vocab_file: str) -> str:
    """Write a corpus of 60 documents of 5 to 200 random token ids, each ended by <eod>; return its prefix."""
    prefix = str(folder / "tiny")
    eod = load_tokenizer(vocab_file).eod
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            # Some ids are much more frequent than others; a model can learn these frequencies.
            ids = (300 + 60 * rng.standard_exponential(int(rng.integers(5, 200)))).astype(np.int64) % 2900 + 3
            builder.add_document(np.append(ids, eod))
    return prefix

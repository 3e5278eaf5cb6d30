"""What several tests share: a tokenizer and a small corpus, made once."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_utils.documents import texts
from megatron.data.indexed_dataset import IndexedDatasetBuilder
from megatron.tokenizer import load_tokenizer
from megatron.tokenizer.sentencepiece import train

from .support import ROOT

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def sample_corpus() -> Path:
    return ROOT / "corpus" / "sample.jsonl"


@pytest.fixture(scope="session")
def vocab_file(tmp_path_factory: pytest.TempPathFactory, sample_corpus: Path) -> str:
    """A tokenizer of 3000 tokens, trained on the bundled corpus."""
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    train(texts([str(sample_corpus)]), path, 3000)
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory, vocab_file: str) -> str:
    """Prefix of a corpus of random ids: 60 documents of 5 to 200 tokens, each ended by <eod>."""
    prefix = str(tmp_path_factory.mktemp("data") / "tiny")
    eod = load_tokenizer(vocab_file).eod
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(60):
            # A skewed distribution, so that there is something to learn.
            ids = (300 + 60 * rng.standard_exponential(int(rng.integers(5, 200)))).astype(np.int64) % 2900 + 3
            builder.add_document(np.append(ids, eod))
    return prefix


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A small JSON-lines file."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"text": f"第{i}篇文章。\nDocument number {i}. " + "词" * (i % 7)} for i in range(40)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path

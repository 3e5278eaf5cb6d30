"""A weight below 1 selects a random subset of a file; selections are independent across seeds, files and documents."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_utils import chunk_tokens, preprocess_data
from data_utils.documents import chunks, documents, read_texts
from data_utils.files import Source
from data_utils.train_tokenizer import sample_documents
from megatron.tokenizer import Tokenizer, load_tokenizer

LINES = 4096
SEEDS = (1234, 1235, 1236, 1237, 1238, 1250, 2234, 0, 1)
SAMPLING_ERROR = 5 / LINES**0.5  # five standard deviations; the correlation of independent selections is below this


def taken(path: Path, seed: int, number: int = 0, weight: float = 0.5) -> NDArray[np.float64]:
    """Return an array [LINES] with 1 for each selected line of the file, else 0."""
    found = np.zeros(LINES)
    for chunk in chunks(Source(str(path), weight, number)):
        for (text,) in documents(chunk, seed=seed):
            found[int(text)] = 1
    return found


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draws") / "x.jsonl"
    path.write_text("".join(f'{{"text": "{i:06}"}}\n' for i in range(LINES)))
    return path


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_halves_of_any_two_seeds_and_files_are_independent(lines: Path) -> None:
    halves = {(seed, number): taken(lines, seed, number) for seed in SEEDS for number in (0, 1, 2, 10)}
    for place, half in halves.items():
        assert abs(half.mean() - 0.5) < SAMPLING_ERROR, place
    names = list(halves)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert abs(correlation(halves[one], halves[other])) < SAMPLING_ERROR, (one, other)


@pytest.mark.parametrize("weight", [0.5, 0.1, 0.9])
def test_neighbours_are_independent(lines: Path, weight: float) -> None:
    half = taken(lines, 1234, weight=weight)
    assert abs(half.mean() - weight) < SAMPLING_ERROR
    for lag in (1, 2, 3, 4, 8, 16, 64, 128):
        assert abs(correlation(half[lag:], half[:-lag])) < SAMPLING_ERROR, lag


def test_weights_nest(lines: Path) -> None:
    """A larger weight with the same seed selects all lines that a smaller weight selects."""
    assert (taken(lines, 7, weight=0.3) <= taken(lines, 7, weight=0.6)).all()


@pytest.mark.parametrize("longest_first", [False, True])
def test_the_text_for_a_tokenizer_is_as_long_as_asked_for(longest_first: bool) -> None:
    """Whatever the order of long and short documents, each is in the sample with the same probability."""
    short = [f"{i:010}" for i in range(2000)]
    long = [f"{i:01000}" for i in range(20)]
    given = [*long, *short] if longest_first else [*short, *long]
    counts = {10: 0, 1000: 0}
    for seed in range(40):
        sample = sample_documents(iter(given), 20_000, seed, quiet=True)
        assert sample == [text for text in given if text in set(sample)], "in the order of the input"
        assert 20_000 <= sum(map(len, sample)) < 21_000
        for text in sample:
            counts[len(text)] += 1
    # 20,000 of 40,000 bytes are half of the documents of each kind.
    assert counts[10] / (40 * 2000) == pytest.approx(0.5, abs=0.05)
    assert counts[1000] / (40 * 20) == pytest.approx(0.5, abs=0.09)
    assert sample_documents(iter(given), 10**6, 1, quiet=True) == given


def test_a_tokenizer_reads_the_half_that_a_corpus_does(lines: Path) -> None:
    assert [int(text) for text in read_texts([f"{lines}@0.5"], seed=7)] == np.flatnonzero(taken(lines, 7)).tolist()


@pytest.mark.parametrize("objective", ["text", "cpm-t5"])
def test_copies_are_encoded_once(
    objective: str, tmp_path: Path, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FILE@3 takes the memory of FILE in the tokenizer, and gives the tokens of a file with each document thrice."""
    tokenizer = load_tokenizer(vocab_file)
    encode_batch = type(tokenizer).encode_batch
    encoded: list[str] = []

    def recorded(self: Tokenizer, texts: Sequence[str]) -> list[Any]:
        encoded.extend(texts)
        return encode_batch(self, texts)

    monkeypatch.setattr(type(tokenizer), "encode_batch", recorded)
    flags = f"--input - --output-prefix x --vocab-file {vocab_file} --objective {objective}".split()
    chunk_tokens.start_worker(preprocess_data.build_parser().parse_args(flags), tokenizer.fingerprint)
    texts = ["春眠不觉晓，处处闻啼鸟。", "夜来风雨声，花落知多少。"]
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    (tmp_path / "thrice.jsonl").write_text("".join(3 * f'{{"text": "{text}"}}\n' for text in texts))
    (chunk,) = chunks(Source(f"{tmp_path}/x.jsonl", 3.0))
    copies = chunk_tokens.tokenize(chunk).parts
    assert encoded == texts
    (chunk,) = chunks(Source(f"{tmp_path}/thrice.jsonl"))
    for part, expected in zip(copies, chunk_tokens.tokenize(chunk).parts, strict=True):
        for name in part._fields:
            np.testing.assert_array_equal(getattr(part, name), getattr(expected, name))

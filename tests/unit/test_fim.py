"""Fill-in-the-middle rearranges documents in the right order, at the right rate, and reproducibly from the seed."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_byte_bpe, train_sentencepiece
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.data.fim import FillInTheMiddle
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tasks.fill_in_the_middle import fill_in_the_middle
from megatron.tokenizer import load_tokenizer
from tests.support import losses, train_gpt2

PREFIX, MIDDLE, SUFFIX, EOD = 901, 902, 903, 0
SHARES = st.floats(0, 1, exclude_max=True)


def gaps(rate: float = 1.0, spm: float = 0.5) -> FillInTheMiddle:
    return FillInTheMiddle(rate, spm, PREFIX, MIDDLE, SUFFIX, EOD)


HALF = gaps(0.5)


def pieces(ids: list[int]) -> tuple[list[int], list[int], list[int], bool]:
    """Split a rearranged document; return (prefix, middle, suffix, whether the suffix comes first).

    In suffix-first (SPM) order, `prefix` is empty, and `middle` consists of the document's prefix and middle.
    """
    assert ids[0] == PREFIX and [ids.count(mark) for mark in (PREFIX, MIDDLE, SUFFIX)] == [1, 1, 1]
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    assert suffix < middle
    return ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle], suffix == 1


@given(st.integers(0, 12), st.booleans(), st.booleans(), SHARES, SHARES)
def test_the_pieces_are_the_text(length: int, closed: bool, spm: bool, first: float, second: float) -> None:
    text, end = list(range(1, 1 + length)), [EOD] * closed
    ids = np.array(text + end, dtype=np.int64)
    found = gaps().rearrange_document(ids, True, spm, (first, second)).tolist()
    assert len(found) == len(ids)
    if length < 4:
        assert found == ids.tolist()
        return
    assert found[len(found) - closed :] == end
    prefix, middle, suffix, suffix_first = pieces(found[: len(found) - closed])
    # In suffix-first order, `middle` also contains the prefix of the text.
    assert (middle + suffix if suffix_first and spm else prefix + middle + suffix) == text[: length - 3]
    assert gaps().rearrange_document(ids, False, spm, (first, second)).tolist() == ids.tolist()


def test_rates_and_cuts() -> None:
    """Documents are rearranged at the given rates, and the cut positions are uniform.

    The three special tokens displace 3 of a document's 12 tokens, so a cut has 10 possible positions, 0 to 9.
    """
    window = np.tile(np.append(np.arange(1, 13), EOD), 8)
    windows = [gaps(0.6, 0.3).rearrange_window(window, [13] * 8, [7, n]) for n in range(500)]
    found = np.concatenate(windows).reshape(4000, 13)
    rearranged = found[found[:, 0] == PREFIX]
    assert (found[found[:, 0] != PREFIX] == [*range(1, 13), EOD]).all()
    assert abs(len(rearranged) / 4000 - 0.6) < 4 * (0.6 * 0.4 / 4000) ** 0.5
    # `first` has the documents in prefix-first (PSM) order whose two cuts are not at position 0. A document is in this
    # order with probability 0.7; each cut is at another position than 0 with probability 0.9.
    first = rearranged[rearranged[:, 1] == 1]
    chance = 0.7 * 0.9**2
    assert abs(len(first) / len(rearranged) - chance) < 4 * (chance * (1 - chance) / len(rearranged)) ** 0.5
    # The earlier of two uniform cuts is at position k with probability (19 - 2 k) / 100.
    shares = np.bincount([row.index(SUFFIX) - 1 for row in first.tolist()], minlength=10)[1:] / len(first)
    wanted = np.array([19 - 2 * k for k in range(1, 10)]) / 81
    assert np.abs(shares - wanted).max() < 4 * (0.21 * 0.79 / len(first)) ** 0.5


def test_a_sample_is_a_pure_function_of_seed_and_number(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for d in range(20):
            builder.add_document([*range(10 * d + 1, 10 * d + 9), EOD])
    indexed = IndexedDataset(tmp_path / "a")

    def read(seed: int, numbers: list[int], chosen: FillInTheMiddle | None = HALF) -> list[list[int]]:
        dataset = GPT2Dataset(indexed, range(20), 30, seed, "train", 1000, chosen)
        return [dataset[n]["text"].tolist() for n in numbers]

    numbers = [12, 3, 0, 7]
    assert read(1, numbers) == read(1, numbers[::-1])[::-1]
    plain = read(1, numbers, None)
    assert read(1, numbers, gaps(0.0)) == plain
    assert read(1, numbers) != plain
    assert [len(text) for text in read(1, numbers)] == [31] * 4
    again = read(1, [n + 5 * GPT2Dataset(indexed, range(20), 30, 1, "train").samples_per_epoch for n in numbers])
    assert again != read(1, numbers)


def test_marks_must_be_in_the_tokenizer(vocab_file: str) -> None:
    config = parse(
        ["--vocab-file", vocab_file, "--family", "gpt2", "--fim-rate", "0.5", "--fim-tokens", "<a>", "<b>", "<eod>"]
    )
    with pytest.raises(ValueError, match="--special-tokens"):
        fill_in_the_middle(config, load_tokenizer(vocab_file))


def test_marks_need_not_be_special(tmp_path: Path) -> None:
    """Fill-in-the-middle tokens may be added tokens that are not marked special, like Qwen's."""
    marks, path = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], tmp_path / "tokenizer.json"
    train_byte_bpe(["the quick brown fox"] * 9, str(path), 270, "hf", marks)
    content = json.loads(path.read_text())
    for token in content["added_tokens"][1:]:
        token["special"] = False
    path.write_text(json.dumps(content))
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    config = parse(["--vocab-file", str(path), "--family", "gpt2", "--fim-rate", "0.5", "--fim-tokens", *marks])
    found = fill_in_the_middle(config, load_tokenizer(str(path)))
    assert found is not None and [found.prefix, found.middle, found.suffix] == [ids[mark] for mark in marks]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--family gpt2 --fim-rate 0.5", "needs --fim-tokens PREFIX MIDDLE SUFFIX"),
        ("--family gpt2 --fim-rate 0.5 --fim-tokens a b b", "needs --fim-tokens PREFIX MIDDLE SUFFIX"),
        ("--family gpt2 --fim-tokens a b c", "give --fim-rate, too"),
        ("--family gpt2 --fim-rate 0.5 --fim-tokens a b c --objective sft", "--objective sft does not read"),
        ("--family t5 --fim-rate 0.5 --fim-tokens a b c", "--objective span-corruption does not read"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags.split())


def test_a_run_reads_rearranged_text(tmp_path: Path) -> None:
    """A run with --fim-rate trains on rearranged documents, and its checkpoint records the rate."""
    marks, vocab_file = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], str(tmp_path / "t.model")
    train_sentencepiece(["abc abd <fim_middle> bcd"] * 9, vocab_file, 280, specials=marks)
    tokenizer = load_tokenizer(vocab_file)
    assert not {tokenizer.specials[mark] for mark in marks} & set(tokenizer.encode("<fim_prefix><fim_middle>"))
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder:
        for d in range(40):
            builder.add_document([*(20 + (d + np.arange(30)) % 200), tokenizer.eod])
    size = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --batch-size 2 --log-interval 1"
    flags = [*size.split(), "--data-path", str(tmp_path / "a"), "--vocab-file", vocab_file, "--eval-iters", "0"]
    flags += ["--no-tensorboard", "--split", "1"]
    fim = ["--fim-rate", "0.9", "--fim-tokens", *marks]
    plain = losses(train_gpt2(1, tmp_path / "plain", *flags, "--train-iters", "1"))
    assert losses(train_gpt2(1, tmp_path / "fim", *flags, *fim, "--train-iters", "1")) != plain
    with pytest.raises(AssertionError, match="--fim-rate"):
        train_gpt2(1, tmp_path / "fim", *flags, "--train-iters", "2")

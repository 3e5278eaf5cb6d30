"""Bits per byte of training, evaluations and corpora: losses in bits over the UTF-8 bytes of the corpus's own text."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils.documents import read_texts
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_byte_bpe, train_sentencepiece
from megatron.checkpointing import TrainState
from megatron.config.command_line import parse
from megatron.features import target_bytes
from megatron.features.bits_per_byte import BitsPerByte
from megatron.seeds import CPU
from megatron.tasks.gpt2 import GPT2
from megatron.tokenizer import load_tokenizer
from tests.materials import SAMPLE
from tests.support import covering, train_gpt2, train_t5

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --batch-size 2 --gas 2 --train-iters 4 --eval-iters 2"
STEPS = "--eval-interval 2 --log-interval 2 --lr 1e-3 --hidden-dropout 0 --attention-dropout 0 --precision fp32"


def corpus_of(documents: list[str], prefix: Path, vocab_file: str) -> tuple[str, float]:
    """Write a corpus; return (its prefix, bytes of text per token). End-of-document tokens have no bytes."""
    tokenizer = load_tokenizer(vocab_file)
    tokens = 0
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for text in documents:
            ids = [*tokenizer.encode(text), tokenizer.eod]
            tokens += len(ids)
            builder.add_document(ids)
    return str(prefix), sum(len(text.encode()) for text in documents) / tokens


def sizes_of(rows: list[dict[str, Any]], split: str) -> list[float]:
    """Return the bytes of a target that the rows of a split imply."""
    found = []
    for row in rows:
        if row["split"] == split:
            found.append(row["lm_loss"] / math.log(2) / row["bits_per_byte"])
    return found


LAYOUTS = [(1, ""), (2, "--pipe-parallel-size 2"), (2, "--model-parallel-size 2")]


@pytest.mark.parametrize(("ranks", "layout"), covering(LAYOUTS, LAYOUTS[1:2].__contains__, several=True))
def test_bytes_are_those_of_the_text(ranks: int, layout: str, tmp_path: Path, vocab_file: str) -> None:
    """The corpora are the Chinese and the English documents of the bundled corpus; Chinese characters have 3 bytes."""
    everything = list(read_texts([str(SAMPLE)]))
    chinese = [text for text in everything if len(text.encode()) > 2 * len(text)]
    english = [text for text in everything if len(text.encode()) < 1.1 * len(text)]
    prefixes = []
    sizes = []
    for name, documents in (("zh", chinese), ("en", english)):
        prefix, size = corpus_of(documents, tmp_path / name, vocab_file)
        prefixes.append(prefix)
        sizes.append(size)
    assert sizes[0] != pytest.approx(sizes[1], rel=0.1)
    paths = f"--train-data-path {' '.join(prefixes)} --valid-data-path zh={prefixes[0]} en={prefixes[1]}"
    flags = f"{MODEL} {STEPS} {layout} --seq-length 64 --vocab-file {vocab_file} {paths}"
    rows = train_gpt2(ranks, tmp_path / "run", *flags.split())
    for name, size in zip(("zh", "en"), sizes, strict=True):
        for split in (f"train/{name}", f"valid/{name}"):
            found = sizes_of(rows, split)
            assert found and found == pytest.approx([size] * len(found), rel=0.02)
    for split in ("train", "valid"):
        (size, *others) = sizes_of(rows, split)
        assert min(sizes) < size < max(sizes) and others == pytest.approx([size] * len(others))
    # The bytes of an evaluation are those of its 2 batches of 2 x 2 samples.
    tokenizer = load_tokenizer(vocab_file)
    (_, valid, _), _ = GPT2().datasets(parse(flags.split(), GPT2.defaults, 1), tokenizer)
    evaluated = [valid["zh"][n]["text"].tolist()[1:] for n in range(8)]
    texts = [tokenizer.decode([i for i in ids if i != tokenizer.eod]) for ids in evaluated]
    text = "".join(texts).replace("\ufffd", "?")  # one byte of a character that a sample cuts
    assert sizes_of(rows, "valid/zh")[0] == pytest.approx(len(text.encode()) / (8 * 64))


def test_counting_changes_no_random_numbers(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """The first log line counts. Whether it follows step 1 or step 4, the last loss with dropout is the same."""
    flags = f"{MODEL} {STEPS} --hidden-dropout 0.1 --seq-length 32 --vocab-file {vocab_file} --data-path {tiny_data}"
    counted = train_gpt2(1, tmp_path / "a", *flags.split(), "--log-interval", "1")
    later = train_gpt2(1, tmp_path / "b", *flags.split(), "--log-interval", "4")
    assert counted[-1]["lm_loss"] == later[-1]["lm_loss"]


def test_targets_of_t5_are_its_masked_spans(tmp_path: Path, vocab_file: str) -> None:
    """Sentinels have no bytes, so a target has fewer bytes than a token of the text."""
    prefix, size = corpus_of(list(read_texts([str(SAMPLE)])), tmp_path / "all", vocab_file)
    flags = f"{MODEL} {STEPS} --enc-seq-length 64 --dec-seq-length 32 --vocab-file {vocab_file} --data-path {prefix}"
    rows = train_t5(1, tmp_path / "run", *flags.split())
    (found, *_) = sizes_of(rows, "train")
    # A span of three tokens has four targets: its sentinel, too.
    assert 0.6 * size < found < 0.85 * size
    printed = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert printed["bits_per_byte"] > 0


@pytest.mark.parametrize(
    ("prefixes", "eod_mask_loss", "expected"),
    [
        (None, False, (10, 6)),
        (None, True, (7, 4)),
        ([1, 1, 0, 1, 0, 0], False, (7, 5)),
        ([1, 1, 1, 0, 0, 0], True, (4, 2)),
    ],
)
def test_masked_targets_have_no_bytes(
    prefixes: list[int] | None, eod_mask_loss: bool, expected: tuple[int, int]
) -> None:
    """Token i stands for i letters, and 0 ends a document. Masked are 3 or 3 and 0 in a prefix, and 2 and 1 after 0."""
    tokenizer: Any = SimpleNamespace(eod=0, specials={"<eod>": 0}, decode=lambda ids: "x" * sum(ids))
    sample = {"text": np.array([5, 3, 0, 2, 4, 0, 1])}
    if prefixes is not None:
        sample["prefixes"] = np.array(prefixes)
    assert target_bytes.bytes_of_targets(sample, tokenizer, eod_mask_loss) == expected


@pytest.mark.parametrize("sample", [7, {"x": [1, 2]}, {"text": "words"}, {"labels": 3, "loss_mask": 1}])
def test_of_an_unknown_form_one_sample_is_read(sample: Any) -> None:
    reads: list[int] = []

    class Custom:
        def __getitem__(self, n: int) -> Any:
            reads.append(n)
            return sample

    run: Any = SimpleNamespace(
        device=CPU, datasets=(Custom(), None, None), tokenizer=SimpleNamespace(), config=parse([])
    )
    assert target_bytes.bytes_per_target(run, "train", range(10**9)) == {} and reads == [0]


@pytest.mark.parametrize("file", ["tokenizer.json", "t.model"])
def test_a_part_of_a_character_has_its_own_bytes(file: str, tmp_path: Path) -> None:
    """Each of the three bytes of 龍 is a token, of which a T5's spans may mask any."""
    text = ["the river runs to the sea"] * 9
    if file == "t.model":
        train_sentencepiece(text, str(tmp_path / file), 290)
    else:
        train_byte_bpe(text, str(tmp_path / file), 270, "hf")
    tokenizer = load_tokenizer(str(tmp_path / file))
    ids = tokenizer.encode("龍龍龍s")
    assert len(ids) == 10
    for mask in ("1001111110", "0111110001", "1111111111"):
        sample = {"labels": np.array(ids), "loss_mask": np.array([int(each) for each in mask])}
        assert target_bytes.bytes_of_targets(sample, tokenizer) == (mask.count("1"), mask.count("1"))


def test_each_data_stage_has_its_own_bytes(tmp_path: Path, vocab_file: str) -> None:
    """A row of training has the mean bytes of its samples, or those of a stage that ends with it."""
    texts = list(read_texts([str(SAMPLE)]))
    chinese = [text for text in texts if len(text.encode()) > 2 * len(text)]
    english = [text for text in texts if len(text.encode()) < 1.1 * len(text)]
    first, first_size = corpus_of(english, tmp_path / "en", vocab_file)
    second, second_size = corpus_of(chinese, tmp_path / "zh", vocab_file)
    tokenizer = load_tokenizer(vocab_file)
    flags = "--seq-length 64 --split 1,0,0 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --batch-size 2 "
    stages = ["--data-stages", f"0: {first}; 6000: {second}"]
    config = parse([*flags.split(), "--vocab-file", vocab_file, *stages], GPT2.defaults, 1)
    datasets, _ = GPT2().datasets(config, tokenizer)
    state = TrainState()
    run: Any = SimpleNamespace(device=CPU, datasets=datasets, tokenizer=tokenizer, config=config, state=state)
    feature = BitsPerByte()
    feature.start(run)

    def size_of(split: str, samples: int) -> float:
        state.consumed_samples = samples
        row: dict[str, Any] = {"split": split, "lm_loss": math.log(2)}
        feature.extend(row)
        return 1 / float(row["bits_per_byte"])

    assert size_of("train", 6000) == pytest.approx(first_size, rel=0.02)
    assert size_of("train", 6002) == pytest.approx(second_size, rel=0.02)
    assert size_of("train/zh", 6002) == pytest.approx(second_size, rel=0.02)
    state.consumed_samples = 4000
    feature.start(run)
    assert size_of("train", 7000) == pytest.approx((2 * first_size + second_size) / 3, rel=0.02)
    assert size_of("train/en", 7000) == pytest.approx(first_size, rel=0.02), "steps before the change are in this row"
    assert size_of("train", 7002) == pytest.approx(second_size, rel=0.02)


def test_a_corpus_that_the_counted_samples_lack_is_counted_alone(
    tmp_path: Path, vocab_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list(read_texts([str(SAMPLE)]))
    chinese = [text for text in texts if len(text.encode()) > 2 * len(text)]
    english = [text for text in texts if len(text.encode()) < 1.1 * len(text)]
    rare, size = corpus_of(chinese, tmp_path / "zh", vocab_file)
    frequent, _ = corpus_of(english, tmp_path / "en", vocab_file)
    monkeypatch.setattr(target_bytes, "MAX_TARGETS", 640)  # 10 samples, which hold none of a corpus of 1 %
    flags = "--seq-length 64 --split 1 --num-layers 2 --hidden-size 16 --num-attention-heads 4 --batch-size 2"
    blend = ["--data-path", "0.99", frequent, "0.01", rare]
    config = parse([*flags.split(), "--vocab-file", vocab_file, *blend], GPT2.defaults, 1)
    tokenizer = load_tokenizer(vocab_file)
    datasets, _ = GPT2().datasets(config, tokenizer)
    feature = BitsPerByte()
    feature.start(
        SimpleNamespace(device=CPU, datasets=datasets, tokenizer=tokenizer, config=config, state=TrainState())
    )  # type: ignore[arg-type]
    row: dict[str, Any] = {"split": "train/zh", "lm_loss": math.log(2)}
    feature.extend(row)
    assert 1 / row["bits_per_byte"] == pytest.approx(size, rel=0.05)


def test_labels_that_are_no_token_ids_are_not_counted() -> None:
    for labels, is_known in (([0.5, -2.0], False), ([3, 4], True), ("text", False)):
        assert target_bytes._has_known_form({"labels": labels, "loss_mask": [1, 1]}) == is_known

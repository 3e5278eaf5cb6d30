"""pretrain_t5.py and the tools that read its runs work from the command line."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.config.command_line import from_file
from megatron.data.indexed_dataset import IndexedDataset
from megatron.tasks import T5
from megatron.tokenizer import load_tokenizer
from tests.support import FULL, command, covering, losses, train_t5

VARIANTS = {
    "cpm": ["--span-convention", "cpm", "--reset-attention-mask", "--num-sentinels", "30"],
    "t5": [
        "--normalization", "rmsnorm", "--position-embedding", "relative", "--no-scale-attention", "--no-hidden-bias",
        "--activation", "gated-gelu", "--no-tie-embeddings",
    ],
}  # fmt: skip


@pytest.fixture(scope="module", params=covering(list(VARIANTS), lambda name: name == "t5"))
def flags(request: pytest.FixtureRequest, tiny_data: str, vocab_file: str) -> list[str]:
    return [
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        "--split",
        "8,2",
        "--num-layers",
        "1",
        "--num-decoder-layers",
        "2",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--enc-seq-length",
        "24",
        "--seq-length",
        "24",
        "--batch-size",
        "2",
        "--log-interval",
        "1",
        "--eval-iters",
        "2",
        "--precision",
        "fp32",
        "--no-tensorboard",
        "--train-iters",
        "4",
        "--save-interval",
        "2",
        "--eval-interval",
        "1",
        "--lr",
        "1e-2",
        "--lr-decay-iters",
        "4",
        "--partition-method",
        "type:Block",
        *VARIANTS[request.param],
    ]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param(2, ["--pipe-parallel-size", "2"], marks=FULL),
        (2, ["--pipe-parallel-size", "2", "--precision", "bf16", "--checkpoint-activations"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_same_command_continues(tmp_path: Path, flags: list[str], world: int, layout: list[str]) -> None:
    """A run that stops and resumes has exactly the losses of an uninterrupted one, with dropout and evaluations."""
    flags = [*flags, *layout]
    whole = losses(train_t5(world, tmp_path / "whole", *flags))
    first = losses(train_t5(world, tmp_path / "cut", *flags, "--train-iters", "2"))
    both = losses(train_t5(world, tmp_path / "cut", *flags))
    assert first == whole[:2]
    assert both == whole


@FULL
def test_every_layout_continues_every_other(tmp_path: Path, flags: list[str]) -> None:
    """A run that is resumed in another layout after every iteration has the losses of one process with dropout off."""
    flags = [*flags, "--hidden-dropout", "0", "--attention-dropout", "0", "--gas", "2"]
    halves = [*flags, "--gas", "1"]
    layouts = [
        (1, flags),
        (3, [*flags, "--pipe-parallel-size", "3"]),
        (2, [*halves, "--zero-stage", "2"]),
        (4, [*flags, "--model-parallel-size", "2", "--pipe-parallel-size", "2"]),
    ]
    whole = losses(train_t5(1, tmp_path / "whole", *flags))
    for iterations, (world, argv) in enumerate(layouts, 1):
        found = losses(train_t5(world, tmp_path / "relay", *argv, "--train-iters", str(iterations)))
    assert found == pytest.approx(whole, rel=1e-5)


def test_the_report_compares_like_with_like(tmp_path: Path, flags: list[str], tiny_data: str, vocab_file: str) -> None:
    """tools/report.py prints the right unigram entropy of the masked text, and the losses in metrics.jsonl."""
    valid = [row for row in train_t5(1, tmp_path, *flags) if row["split"] == "valid"]
    assert all(row["text_loss"] > 0 and 0 <= row["text_accuracy"] <= 1 for row in valid)
    config = from_file(str(tmp_path / "config.json"))
    tokenizer = T5().extended(config, load_tokenizer(vocab_file))
    (_, dataset, _), _ = T5().datasets(config, tokenizer)
    assert dataset is not None
    indexed = IndexedDataset(tiny_data)
    shown = Counter(indexed.tokens[: indexed.document_ends()[round(0.8 * indexed.num_documents) - 1]].tolist())
    words = [i for i in range(tokenizer.pad) if i != tokenizer.eod]
    total = sum(shown[i] + 1 for i in words)
    asked = [i for n in range(4) for i in dataset[n]["labels"].tolist() if i in words]
    expected = -sum(math.log((shown[i] + 1) / total) for i in asked) / len(asked)
    done = command("python", "tools/report.py", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    facts = [line for line in done.stdout.splitlines() if "  " in line]  # the last line is the path of the page
    said = dict(re.split("  +", line, maxsplit=1) for line in facts)
    assert said["unigram entropy of the masked text"].startswith(f"{expected:.3f} nats")
    assert said["masked text only, first and last"].startswith(
        f"{valid[0]['text_loss']:.3f}, {valid[-1]['text_loss']:.3f}"
    )
    # Unlike the masked text, the targets include sentinels, which are so frequent that they lower the entropy.
    assert float(said["unigram entropy of the targets"].split()[0]) < expected


def test_beforehand_masked_corpora_train_and_fill(tmp_path: Path, sample_corpus: Path, vocab_file: str) -> None:
    """A T5 trains on a corpus that preprocess_data.py --objective cpm-t5 has masked.

    The trained model generates the same text in one process and on two tensor-parallel ranks.
    """
    prefix = str(tmp_path / "corpus")
    made = command(
        "python",
        "tools/preprocess_data.py",
        "--input",
        str(sample_corpus),
        "--vocab-file",
        vocab_file,
        "--output-prefix",
        prefix,
        "--objective",
        "cpm-t5",
        "--quiet",
    )
    assert made.returncode == 0, made.stderr
    run_dir = str(tmp_path / "run")
    argv = [
        "--data-path",
        f"{prefix}_text_document",
        "--vocab-file",
        vocab_file,
        "--split",
        "9,1",
        "--num-layers",
        "1",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--enc-seq-length",
        "48",
        "--seq-length",
        "48",
        "--batch-size",
        "2",
        "--train-iters",
        "4",
        "--eval-iters",
        "1",
        "--no-tensorboard",
        "--run-dir",
        run_dir,
        *VARIANTS["cpm"],
    ]
    refused = command("python", "pretrain_t5.py", *argv)
    assert refused.returncode == 1
    assert "--dec-seq-length" in refused.stderr
    done = command("python", "pretrain_t5.py", *argv, "--dec-seq-length", "24")
    assert done.returncode == 0, done.stderr
    ask = ["tools/generate.py", "--load", run_dir, "--prompt", "春天<s_0>花<s_1>。", "--temperature", "0", "--json"]
    alone = command("python", *ask)
    assert alone.returncode == 0, alone.stderr
    text = json.loads(alone.stdout)["text"]
    assert text.startswith("春天")
    launch = ("python", "tools/launch.py", "--standalone", "--nproc-per-node", "2")
    both = command(*launch, *ask, "--model-parallel-size", "2")
    assert both.returncode == 0, both.stderr
    assert json.loads(both.stdout)["text"] == text
    beams = command("python", *ask, "--num-beams", "3", "--num-samples", "2")
    assert len(beams.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("code", "more", "message"),
    [
        (1, ["--num-sentinels", "1"], "raise --num-sentinels (now 1)"),
        (2, ["--span-convention", "bert"], "--span-convention bert must be one of t5, cpm"),
        (2, ["--pipeline-schedule", "interleaved"], "interleaved needs 2 or more"),
        (2, ["--pipeline-schedule", "zb-h1", "--checkpoint-activations"], "use 1f1b with --checkpoint-activations"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_gets_one_sentence(
    tmp_path: Path, tiny_data: str, vocab_file: str, code: int, more: list[str], message: str
) -> None:
    base = [
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        "--run-dir",
        str(tmp_path),
        "--enc-seq-length",
        "64",
        "--train-iters",
        "1",
    ]
    done = command("python", "pretrain_t5.py", *base, "--num-layers", "1", "--hidden-size", "12", *more)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr

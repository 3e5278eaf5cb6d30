"""--sample-prompt: the same texts in every layout, those of tools/generate.py, and an unchanged training."""

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.model.layers import global_parameters
from megatron.tokenizer import load_tokenizer
from megatron.training.loop import train as train_run
from tests.checkpoints.runs import Start, make
from tests.conformance.engines import remembered_groups
from tests.support import command, covering, losses, on_ranks, train, train_gpt2

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --train-iters 4 --eval-iters 1"
STEPS = "--eval-interval 2 --log-interval 1 --lr 1e-2 --hidden-dropout 0.1 --attention-dropout 0.1 --precision fp64"
PROMPTS = ["the river", "春天", "a prompt with more tokens than the others have, so that it is longer than the window"]
ASKED = ["--sample-prompt", *PROMPTS, "--sample-tokens", "12"]


def texts_of(rows: list[dict[str, Any]]) -> list[list[str]]:
    found = []
    for row in rows:
        if row["split"] == "samples":
            assert [each["prompt"] for each in row["samples"]] == PROMPTS
            found.append([each["text"] for each in row["samples"]])
    return found


def flags_of(data: str, vocab_file: str, more: str = "") -> list[str]:
    return f"{MODEL} {STEPS} --vocab-file {vocab_file} --data-path {data} {more}".split()


LAYOUTS = [
    (2, "--batch-size 2 --gas 2 --pipe-parallel-size 2 --logits-chunk-size 20"),
    (2, "--batch-size 4 --gas 1 --model-parallel-size 2 --logits-chunk-size 20"),
    (2, "--batch-size 1 --gas 2"),
    (2, "--batch-size 2 --gas 2 --context-parallel-size 2"),
    (4, "--batch-size 1 --gas 4 --pipe-parallel-size 2 --model-parallel-size 2 --pipeline-schedule zb-h1"),
]


def test_texts_are_those_of_every_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Without dropout the weights of all layouts are equal, so the draws from them are, too."""
    plain = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    expected: list[list[str]] = []
    for number, (world, more) in enumerate([(1, "--batch-size 4 --gas 1"), *LAYOUTS]):
        rows = train_gpt2(world, tmp_path / str(number), *flags_of(tiny_data, vocab_file, more), *plain, *ASKED)
        found = texts_of(rows)
        assert len(found) == 2  # at iteration 2, and at the end
        for prompt, text in zip(PROMPTS, found[1], strict=True):
            assert text.startswith(prompt) and len(text) > len(prompt)
        expected = expected or found
        assert found == expected, more


@pytest.mark.parametrize("family", covering(["gpt2", "llama"], "llama".__eq__))
def test_greedy_texts_are_those_of_the_tool(family: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    given = flags_of(tiny_data, vocab_file, "--batch-size 2 --gas 2 --pipe-parallel-size 2 --num-key-value-heads 4")
    if family == "gpt2":
        given = given[: given.index("--num-key-value-heads")]
    rows = train(family, 2, tmp_path, *given, *ASKED, "--sample-temperature", "0")
    specials = load_tokenizer(vocab_file).specials
    eod = next(name for name, i in specials.items() if i == load_tokenizer(vocab_file).eod)
    for prompt, text in zip(PROMPTS[:2], texts_of(rows)[-1][:2], strict=True):
        words = ["--load", str(tmp_path), "--prompt", f"{eod}{prompt}", "--max-new-tokens", "12", "--temperature", "0"]
        done = command("python", "tools/generate.py", *words, "--special-tokens")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().removeprefix(eod) == text.strip()


def test_training_is_unchanged(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    given = flags_of(tiny_data, vocab_file, "--batch-size 2 --gas 2")
    without = train_gpt2(1, tmp_path / "a", *given)
    sampled = train_gpt2(1, tmp_path / "b", *given, *ASKED, "--sample-interval", "1")
    assert losses(sampled) == losses(without)
    assert losses(sampled, "valid") == losses(without, "valid")
    assert len(texts_of(sampled)) == 4


def _sampled_with_nan(folder: str, data: str, vocab_file: str) -> str:
    flags = "--pipe-parallel-size 2 --sample-prompt river --sample-interval 1 --sample-temperature"
    with contextlib.redirect_stdout(io.StringIO()) as said, remembered_groups() as begin:
        for temperature in ("0", "0.8"):
            begin()
            start = Start("gpt2", Path(folder), f"{flags} {temperature} --train-iters 0")
            with make(start, data, vocab_file) as run:
                for name, p in global_parameters(run.engine.deepspeed.module):
                    if name == "final_norm.norm.weight":
                        p.data[0] = math.nan
                train_run(run)
    return said.getvalue()


def test_a_model_with_nan_logits_gives_a_note_and_no_sample(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    said, _ = on_ranks(2, _sampled_with_nan, str(tmp_path), tiny_data, vocab_file)
    assert said.count("note: no samples at iteration 0") == 2
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "more", "named"),
    [
        ("gpt2", "--sample-tokens 5", "--sample-prompt"),
        ("gpt2", "--sample-prompt x --objective prefix-lm", "--objective"),
        ("t5", "--sample-prompt x", "--sample-prompt"),
        ("gpt2", "--sample-prompt \udcc4\udce3", "--sample-prompt is not valid UTF-8"),  # bytes of GBK
    ],
)
def test_settings_that_do_not_go_together(name: str, more: str, named: str) -> None:
    done = command("python", f"pretrain_{name}.py", "--vocab-size", "100", "--data-path", "none", *more.split())
    assert done.returncode == 2
    assert named in done.stderr

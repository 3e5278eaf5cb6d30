"""Command lines and scripts for CPM-Pretrain and Megatron-LM run unchanged."""

from pathlib import Path
from typing import Any

import pytest

from tests.sentences import SENTENCES
from tests.support import ROOT, command, covering, losses, train_gpt2

SIZES = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --log-interval 1 --eval-iters 0 --lr 1e-2"
)


@pytest.fixture(scope="module")
def flags(tiny_data: str, vocab_file: str) -> list[str]:
    return [*SIZES.split(), "--data-path", tiny_data, "--vocab-file", vocab_file, "--no-tensorboard"]


def launch(world: int, script: str, *argv: str) -> Any:
    base = ["tools/launch.py", "--standalone", "--nproc-per-node", str(world), script]
    return command("python", *base, *argv, env={"PYTHONPATH": str(ROOT)})


def test_a_line_of_megatrons_trains_as_ours_and_says_so_once(tmp_path: Path, flags: list[str]) -> None:
    theirs = (
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4 --data-impl mmap --DDP-impl local "
        "--ffn-hidden-size 40 --distributed-backend gloo --train-samples 12 --lr-warmup-iters 1 --deepspeed"
    )
    ours = "--pipe-parallel-size 2 --batch-size 2 --gas 2 --ff-hidden-size 40 --train-iters 3 --warmup 0.34"
    done = launch(2, "pretrain_gpt2.py", *flags, *theirs.split(), "--run-dir", str(tmp_path / "theirs"))
    assert (done.returncode, done.stderr) == (0, "")
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: --")]
    assert len(notes) == len(set(notes)) == theirs.count("--") - 1  # --train-samples is a flag of this project, too
    assert "note: --global-batch-size 4 translated to --gas 2 (4 = --batch-size 2 x 1 replicas x --gas)" in notes
    expected = losses(train_gpt2(2, tmp_path / "ours", *flags, *ours.split()))
    shown = [line.split("loss ")[1].split()[0] for line in done.stdout.splitlines() if "/3 | loss" in line]
    assert shown == [f"{loss:.4f}" for loss in expected] and len(shown) == 3


def test_what_is_refused_comes_in_one_message(tmp_path: Path, flags: list[str]) -> None:
    wrong = ["--num-unique-layers", "1", "--loss-scale=128", "--hiden-size", "3"]
    done = launch(2, "pretrain_gpt2.py", *flags, *wrong, "--run-dir", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "pretrain_gpt2.py: 3 errors in the settings:",
        "  unknown argument --hiden-size; did you mean --hidden-size?",
        "  --num-unique-layers 1 is not accepted: layers do not share weights",
        '  --loss-scale 128.0 is not accepted: write "fp16": {"loss_scale": ...} in --deepspeed-config',
    ]
    assert not (tmp_path / "run").exists()


def test_exit_interval_saves_and_ends_and_the_same_command_goes_on(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--pipe-parallel-size", "2", "--train-iters", "3"]
    whole = losses(train_gpt2(2, tmp_path / "whole", *flags))
    for done in (2, 3):
        assert losses(train_gpt2(2, tmp_path / "cut", *flags, "--exit-interval", "2")) == whole[:done]


SCRIPT = """
import tests.tutorial_gpt2 as base
from megatron import get_args, get_timers, get_tokenizer, mpu, print_rank_0
from megatron.training import pretrain
from megatron.utils import get_ltor_masks_and_position_ids


def get_batch_pipe(data):
    (tokens, _, documents), (labels, _) = base.get_batch_pipe(data)
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(tokens, get_tokenizer().eod, False, False, False)
    return (tokens, positions, ~mask if get_args().reset_attention_mask else mask), (labels, loss_mask)


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch generator").start()
    (tokens, positions, third), (labels, loss_mask) = get_batch_pipe(next(data_iterator))
    timers("batch generator").stop()
    timers.log(["batch generator"])
    loss = model(tokens, positions, third, labels=labels)
    return (loss * loss_mask).sum() / loss_mask.sum(), {}


def model_provider():
    model = base.model_provider()
    if get_args().pipe_parallel_size:
        model._megatron_batch_fn = get_batch_pipe
    return model


pretrain(base.train_valid_test_datasets_provider, model_provider, forward_step)
"""


@pytest.mark.parametrize("layout", covering([[], ["--pipe-parallel-size", "2"]], bool))
def test_a_script_of_a_tutorial(tmp_path: Path, flags: list[str], layout: list[str]) -> None:
    """The timers and the causal mask of a tutorial script work; an inverted causal mask is refused."""
    script = tmp_path / "pretrain_theirs.py"
    script.write_text(SCRIPT)
    argv = [*flags, *layout, "--train-iters", "2", "--no-save-at-end", "--run-dir", str(tmp_path / "run")]
    done = launch(2, str(script), *argv)
    assert (done.returncode, done.stderr) == (0, "")
    if not layout:
        assert done.stdout.count("time (ms) | batch generator: ") == 2
    done = launch(2, str(script), *argv, "--reset-attention-mask")
    assert done.returncode == 1 and (layout or "Traceback" not in done.stderr)
    assert SENTENCES["the_attention_mask_differs_from_that"] in done.stderr

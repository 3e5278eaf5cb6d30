"""A checkpoint of a model with experts loads in any other layout, another expert-parallel size included."""

import contextlib
import io
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from megatron import mpu
from megatron.training import train
from tests.conformance.engines import remembered_groups
from tests.support import covering, on_ranks

from .runs import Start, losses_of, make, run_all, whole_tensors

SAVED, LAST, GLOBAL_BATCH = 2, 5, 4


class Grid(NamedTuple):
    """Pipeline, data-, tensor- and expert-parallel size, and ZeRO stage; pp 0 means no pipeline."""

    pp: int
    dp: int
    tp: int
    ep: int
    zero: int = 0

    @property
    def world(self) -> int:
        return max(self.pp, 1) * self.dp * self.tp

    def flags(self, precision: str) -> str:
        return (
            f"--pipe-parallel-size {self.pp} --model-parallel-size {self.tp} --expert-parallel-size {self.ep} "
            f"--zero-stage {self.zero} --batch-size 1 --gas {GLOBAL_BATCH // self.dp} --precision {precision}"
        )


WAYS = [
    ("llama", Grid(0, 4, 1, 4, zero=1), Grid(2, 1, 2, 1), "fp32", "adam --ema-decay 0.5"),
    ("llama", Grid(2, 1, 2, 1), Grid(0, 2, 1, 2), "fp64", "adam --skip-step-sigma 6"),
    ("gpt2", Grid(0, 1, 1, 1), Grid(2, 2, 2, 2, zero=1), "fp32", "adam --ema-decay 0.5"),
    ("gpt2", Grid(0, 2, 1, 2, zero=1), Grid(0, 4, 1, 2, zero=1), "fp32", "muon --ema-decay 0.5"),
    ("t5-v1.1", Grid(0, 2, 2, 2), Grid(0, 4, 1, 4, zero=1), "fp32", "muon"),
    ("t5-cpm", Grid(0, 4, 1, 2, zero=1), Grid(2, 2, 1, 2, zero=1), "bf16", "adam"),
]


@pytest.mark.parametrize(
    ("model", "before", "after", "precision", "optimizer"), covering(WAYS, WAYS[:1].__contains__, several=True), ids=str
)
def test_experts_fit_every_layout(
    model: str,
    before: Grid,
    after: Grid,
    precision: str,
    optimizer: str,
    tmp_path: Path,
    tiny_data: str,
    vocab_file: str,
) -> None:
    common = (
        f"--num-experts 4 --num-shared-experts 1 --router-balance bias --init-method-std 0.2 --optimizer {optimizer} "
        f"--lr 3e-3 --train-iters {LAST}"
    )
    first = Start(model, tmp_path / "a", f"{common} {before.flags(precision)} --save-interval {SAVED}")
    on_ranks(before.world, run_all, [first], tiny_data, vocab_file)
    saved = tmp_path / "a" / "checkpoints" / f"iter_{SAVED:07d}"
    # The default, written out, counts as the same setting. T5 takes no number for each layer, because its encoder and
    # decoder have different numbers of layers.
    same = "--moe-layer-frequency " + ("1" if model.startswith("t5") else "1 1 1 1")
    second = Start(model, tmp_path / "b", f"{common} {after.flags(precision)} {same} --load {saved}", save_first=True)
    on_ranks(after.world, run_all, [second], tiny_data, vocab_file)
    there = whole_tensors(saved)
    here = whole_tensors(tmp_path / "b" / "checkpoints" / f"iter_{SAVED:07d}")
    assert there.keys() == here.keys()
    for key, value in there.items():
        assert value.dtype == here[key].dtype and value.tobytes() == here[key].tobytes(), key
    assert any(value.any() for key, value in there.items() if key.endswith("router.bias_steps"))
    tolerance = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 3e-3}[precision]
    np.testing.assert_allclose(losses_of(tmp_path / "b"), losses_of(tmp_path / "a")[SAVED:], rtol=tolerance)


def _spoiled(start: Start, data: str, vocab_file: str, bad: list[int], added: float) -> None:
    """Run `start`, and add `added` to a gradient in the iterations `bad`, counted from 0."""
    with remembered_groups() as begin, contextlib.redirect_stdout(io.StringIO()):
        begin()
        with make(start, data, vocab_file) as run:
            weight = dict(run.engine.deepspeed.module.named_parameters())["final_norm.norm.weight"]
            rng = mpu.get_rng()
            weight.register_hook(lambda g: g + added if rng.iteration in bad else g)  # type: ignore[no-untyped-call]
            train(run)


@pytest.mark.parametrize(("balance", "added"), [("bias", math.nan), ("aux-loss", 500.0)])
def test_a_checkpoint_after_skipped_steps_counts_no_token_twice(
    balance: str, added: float, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A run that resumes from a save during skipped steps equals a run without skipped steps."""
    flags = (
        f"--num-experts 4 --router-balance {balance} --precision fp32 --train-iters {LAST + 1} --batch-size 2 "
        f"--batch-size-schedule '0:2 4_samples:4' --skip-step-sigma 20 --skip-step-window 4"
    )
    whole = Start("gpt2", tmp_path / "whole", f"{flags} --save-interval {LAST + 1}")
    spoiled = Start("gpt2", tmp_path / "spoiled", f"{flags} --save-interval {LAST} --exit-interval {LAST}")
    on_ranks(1, _spoiled, spoiled, tiny_data, vocab_file, [LAST - 2, LAST - 1], added)
    saved = tmp_path / "spoiled" / "checkpoints"
    assert [path.name for path in saved.glob("iter_*")] == [f"iter_{LAST - 2:07d}"]
    on_ranks(1, run_all, [whole, spoiled._replace(flags=f"{flags} --save-interval {LAST + 1}")], tiny_data, vocab_file)
    expected = whole_tensors(tmp_path / "whole" / "checkpoints" / f"iter_{LAST + 1:07d}")
    resumed = whole_tensors(saved / f"iter_{LAST + 1:07d}")
    assert expected.keys() == resumed.keys()
    assert any(key.endswith("router.tokens") for key in expected)
    for key, value in expected.items():
        assert value.tobytes() == resumed[key].tobytes(), key

"""A checkpoint of a model with experts loads in any other layout, another expert-parallel size included."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.support import covering, on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

SAVED, LAST, GLOBAL_BATCH = 2, 5, 8


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
    ("model", "before", "after", "precision", "optimizer"), covering(WAYS, WAYS[:2].__contains__, several=True), ids=str
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

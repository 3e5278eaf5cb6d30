"""With Muon, every layout has the losses of torch.optim.Muon and AdamW in one process of plain torch."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints.runs import Start, losses_of, run_all
from tests.support import covering, on_ranks

from .layouts import LEARNS, Layout, ours, plain


@functools.cache
def expected(data: str, vocab_file: str) -> list[float]:
    return plain(data, vocab_file, optimizer="muon", dtype=torch.float64)


FP64 = [
    Layout(0, 1, 1),
    Layout(0, 2, 1),
    Layout(0, 1, 2),
    Layout(0, 1, 4),
    Layout(2, 1, 1),
    Layout(2, 1, 2),
    Layout(0, 1, 2, cp=2),
    Layout(2, 2, 2),
]
FP32 = [Layout(0, 1, 1), Layout(0, 2, 1, zero=1), Layout(0, 2, 2, zero=1), Layout(2, 2, 1, zero=1), Layout(2, 2, 2)]


@pytest.mark.parametrize("layout", covering(FP64, FP64[5:6].__contains__), ids=str)
def test_in_fp64_nothing_but_the_order_of_sums_differs(
    layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, optimizer="muon", precision="fp64")
    np.testing.assert_allclose(found, expected(tiny_data, vocab_file), rtol=1e-10)


@pytest.mark.parametrize("layout", covering(FP32, FP32[2:3].__contains__), ids=str)
def test_in_fp32(layout: Layout, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    found = ours(layout, tmp_path, tiny_data, vocab_file, optimizer="muon")
    np.testing.assert_allclose(found, expected(tiny_data, vocab_file), rtol=1e-5)


def test_the_reference_learns(tiny_data: str, vocab_file: str) -> None:
    losses = plain(tiny_data, vocab_file, optimizer="muon", dtype=torch.float64, steps=LEARNS)
    assert losses[0] - losses[-1] > 0.3


GRIDS = [(0, 1, 4), (2, 1, 2), (2, 2, 2)]  # pipeline, data and tensor-parallel sizes
CASES = [(model, grid) for model in ("llama", "t5-cpm", "t5-v1.1") for grid in GRIDS]


@pytest.mark.parametrize(("model", "grid"), covering(CASES, [].__contains__, several=True), ids=str)
def test_other_models(model: str, grid: tuple[int, int, int], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Losses equal those of one process with grouped heads that ranks share, gates, cross-attention and tables."""
    losses = []
    for pp, dp, tp in (grid, (0, 1, 1)):
        flags = f"--pipe-parallel-size {pp} --model-parallel-size {tp} --batch-size 2 --gas {4 // dp} --precision fp64"
        start = Start(model, tmp_path / f"tp{tp}", f"{flags} --optimizer muon --lr 3e-3 --train-iters 5")
        on_ranks(max(pp, 1) * dp * tp, run_all, [start], tiny_data, vocab_file)
        losses.append(losses_of(start.run_dir))
    np.testing.assert_allclose(*losses, rtol=1e-10)


def test_stages_without_matrices_clip_alike(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A stage that trains only weights of AdamW clips its gradients, too."""
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps([{"pattern": "layers.[01].*", "frozen": True}]))
    flags = ("--param-groups", str(groups), "--clip-grad", "0.3")
    layouts = Layout(2, 1, 1, zero=1), Layout(0, 1, 1)
    found = [ours(each, tmp_path / str(each), tiny_data, vocab_file, *flags, optimizer="muon") for each in layouts]
    np.testing.assert_allclose(*found, rtol=1e-5)

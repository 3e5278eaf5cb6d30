"""A checkpoint of Muon loads in any other layout, with identical weights and moments and equal later losses.

The moments of the weights that AdamW steps are kept in bf16.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.parity.layouts import Layout
from tests.support import FULL, RankFailure, covering, on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

SAVED, LAST = 2, 4
WAYS = [
    ("llama", Layout(0, 2, 2, zero=1), Layout(2, 1, 2), "fp32"),
    ("llama", Layout(2, 1, 2), Layout(0, 2, 1, zero=1), "fp32"),
    ("llama", Layout(2, 2, 1, zero=1), Layout(0, 1, 1), "fp32"),
    ("gpt2", Layout(0, 1, 4), Layout(0, 4, 1, zero=1), "fp32"),
    ("gpt2", Layout(0, 2, 1), Layout(4, 1, 1), "fp64"),
    ("t5-v1.1", Layout(2, 2, 1, zero=1), Layout(0, 1, 2), "fp32"),
    ("t5-v1.1", Layout(0, 1, 2), Layout(0, 3, 1, zero=1), "fp32"),
    ("llama", Layout(0, 2, 2, zero=1), Layout(2, 2, 1, zero=1), "bf16"),
]
ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
OTHERS = ("word_embeddings", "position_embedding", "relative_positions", "norm", "bias")


def _flags(layout: Layout, precision: str) -> str:
    return (
        f"--pipe-parallel-size {layout.pp} --model-parallel-size {layout.tp} --zero-stage {layout.zero} --batch-size 1 "
        f"--gas {12 // layout.dp} --precision {precision} --train-iters {LAST} --optimizer muon --lr 3e-3 {ROUNDED}"
    )


@pytest.mark.parametrize(("model", "before", "after", "precision"), covering(WAYS, WAYS[:1].__contains__, several=True))
def test_momentum_fits_every_layout(
    model: str, before: Layout, after: Layout, precision: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    first = Start(model, tmp_path / "a", f"{_flags(before, precision)} --save-interval {SAVED}")
    on_ranks(before.world, run_all, [first], tiny_data, vocab_file)
    saved = tmp_path / "a" / "checkpoints" / f"iter_{SAVED:07d}"
    second = Start(model, tmp_path / "b", f"{_flags(after, precision)} --load {saved}", save_first=True)
    on_ranks(after.world, run_all, [second], tiny_data, vocab_file)
    there = whole_tensors(saved)
    here = whole_tensors(tmp_path / "b" / "checkpoints" / f"iter_{SAVED:07d}")
    assert there.keys() == here.keys()
    for key, value in there.items():
        assert value.dtype == here[key].dtype and value.tobytes() == here[key].tobytes(), key
    tolerance = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 2e-3}[precision]
    np.testing.assert_allclose(losses_of(tmp_path / "b"), losses_of(tmp_path / "a")[SAVED:], rtol=tolerance)
    for name in (key.removeprefix("weight.") for key in there if key.startswith("weight.")):
        kinds = {key.split(".", 1)[0] for key in there if key.split(".", 1)[1] == name}
        adam = any(word in name for word in OTHERS)
        assert kinds == {"weight", *(("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",))}, name
        assert adam or np.abs(there[f"momentum_buffer.{name}"]).max() > 0
    optimizer = json.loads((saved / "checkpoint.json").read_text())["optimizer"]
    assert optimizer["step"] == SAVED and optimizer["without_moments"] == []


@FULL
def test_from_another_optimizer_only_without_its_state(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    layout = Layout(0, 1, 1)
    flags = _flags(layout, "fp32")
    adam = flags.replace("muon", "adam")
    on_ranks(1, run_all, [Start("gpt2", tmp_path / "a", f"{adam} --save-interval {SAVED}")], tiny_data, vocab_file)
    load = f"{flags} --load {tmp_path / 'a' / 'checkpoints' / f'iter_{SAVED:07d}'}"
    with pytest.raises(RankFailure, match="--optimizer adam.*--no-load-optim"):
        on_ranks(1, run_all, [Start("gpt2", tmp_path / "b", load)], tiny_data, vocab_file)
    on_ranks(1, run_all, [Start("gpt2", tmp_path / "c", f"{load} --no-load-optim")], tiny_data, vocab_file)
    assert len(losses_of(tmp_path / "c")) == LAST - SAVED

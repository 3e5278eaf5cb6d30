"""A checkpoint of any layout loads in any other layout, with identical weights and moments and equal later losses."""

import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.parity.layouts import Layout
from tests.support import covering, on_ranks

from .runs import MODELS, Start, losses_of, run_all, whole_tensors

LAYOUTS = [
    Layout(0, 1, 1),
    Layout(0, 2, 1, zero=2),
    Layout(0, 2, 1, zero=3),
    Layout(0, 1, 2),
    Layout(1, 2, 2, zero=1),
    Layout(2, 2, 1, zero=1),
    Layout(2, 1, 2),
    Layout(4, 1, 1),
]
SAVED, LAST = 2, 5
ALL = list(itertools.permutations(range(len(LAYOUTS)), 2))
# Pairs that run by default, as indices into LAYOUTS: from ZeRO 3 to a pipeline with tensor parallelism, and back.
BOTH_WAYS = [(2, 6), (6, 2)]


def _flags(layout: Layout) -> str:
    # Some layouts use recomputation and sequence parallelism, which must not change checkpoints or losses.
    saving = "--checkpoint-activations" if layout.pp == 4 else "--checkpoint-attention"
    saving += " --sequence-parallel" if layout.tp > 1 else ""
    return (
        f"--pipe-parallel-size {layout.pp} --model-parallel-size {layout.tp} --zero-stage {layout.zero} --batch-size 2 "
        f"--gas {4 // layout.dp} --precision fp32 --train-iters {LAST} {saving}"
    )


def _launch(starts: dict[Layout, list[Start]], data: str, vocab_file: str) -> None:
    """Do all runs; those with equal pipeline, data-parallel and tensor-parallel sizes share one launch of ranks."""
    grids: defaultdict[tuple[int, int, int], list[Start]] = defaultdict(list)
    for layout, of_it in starts.items():
        grids[layout[:3]] += of_it
    for grid, of_it in grids.items():
        if of_it:
            on_ranks(Layout(*grid).world, run_all, of_it, data, vocab_file, timeout=500)


@pytest.mark.parametrize("model", covering(list(MODELS), lambda model: model == "gpt2"))
@pytest.mark.parametrize("part", covering(["covering", "all"], lambda part: part == "covering"))
def test_every_layout_loads_every_other(model: str, part: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    pairs = ALL if part == "all" else BOTH_WAYS
    sources = sorted({a for a, _ in pairs})
    _launch(
        {
            LAYOUTS[a]: [Start(model, tmp_path / str(a), f"{_flags(LAYOUTS[a])} --save-interval {SAVED}")]
            for a in sources
        },
        tiny_data,
        vocab_file,
    )
    saved = {a: tmp_path / str(a) / "checkpoints" / f"iter_{SAVED:07d}" for a in sources}
    loads: dict[Layout, list[Start]] = {layout: [] for layout in LAYOUTS}
    for a, b in pairs:
        flags = f"{_flags(LAYOUTS[b])} --load {saved[a]}"
        loads[LAYOUTS[b]].append(Start(model, tmp_path / f"{a}to{b}", flags, save_first=True))
    _launch(loads, tiny_data, vocab_file)

    first = whole_tensors(saved[sources[0]])
    for a, b in pairs:
        before = whole_tensors(saved[a])
        after = whole_tensors(tmp_path / f"{a}to{b}" / "checkpoints" / f"iter_{SAVED:07d}")
        words = f"{LAYOUTS[a]} -> {LAYOUTS[b]}"
        assert before.keys() == after.keys() == first.keys(), words
        for key in before:
            assert before[key].dtype == after[key].dtype, words
            assert before[key].tobytes() == after[key].tobytes(), f"{words}: {key}"
        expected = losses_of(tmp_path / str(a))[SAVED:]
        found = losses_of(tmp_path / f"{a}to{b}")
        assert len(found) == LAST - SAVED
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=words)
    assert {key.split(".", 1)[0] for key in first} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(np.abs(value).max() > 0 for key, value in first.items() if key.startswith("exp_avg_sq."))

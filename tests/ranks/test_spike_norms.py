"""Rows of steps that --skip-step-sigma skips have the same numbers in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.runs import Start, run_all
from tests.support import covering, on_ranks

# Of the last steps of this run, some have a gradient norm and some a loss above the mean by a deviation.
FLAGS = "--num-layers 2 --train-iters 17 --skip-step-sigma 1 --skip-step-window 4 --lr 3e-2 --precision fp32"
LAYOUTS = {
    "zero 0": "--zero-stage 0",
    "deepspeed's reduction": "--zero-stage 0 --no-overlap-grad-reduce",
    "zero 1": "--zero-stage 1",
    "deepspeed's zero 1": "--zero-stage 1 --no-overlap-grad-reduce",
    "zero 2": "--zero-stage 2",
    "zero 3": "--zero-stage 3",
    "pipeline": "--pipe-parallel-size 2 --zero-stage 0",
    "pipeline, zero 1": "--pipe-parallel-size 2 --zero-stage 1",
    "pipeline, deepspeed's zero 1": "--pipe-parallel-size 2 --zero-stage 1 --no-overlap-grad-reduce",
    "tensor parallel": "--model-parallel-size 2 --zero-stage 1",
}
IN_CI = ["zero 0", "zero 3", "pipeline, zero 1"]


def _folder(name: str) -> str:
    return str(list(LAYOUTS).index(name))


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("names", covering([IN_CI, [*LAYOUTS]], lambda names: names is IN_CI))
def test_a_skipped_spike_has_its_norm_in_every_layout(
    names: list[str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Spikes of the loss and of the gradient norm are both measured before the step is skipped."""
    one = Start("gpt2", tmp_path / "one", f"{FLAGS} --batch-size 4")
    on_ranks(1, run_all, [one], tiny_data, vocab_file)
    expected = _rows(tmp_path / "one")
    spikes = [spike for row in expected for spike in row.get("skipped_spikes", [])]
    assert {spike["name"] for spike in spikes} == {"loss", "gradient norm"}
    starts = []
    for name in names:
        size = 4 if "--model-parallel" in LAYOUTS[name] else 2
        batches = "--batch-size 2 --gas 2" if "--pipe" in LAYOUTS[name] else f"--batch-size {size}"
        starts.append(Start("gpt2", tmp_path / _folder(name), f"{FLAGS} {LAYOUTS[name]} {batches}"))
    on_ranks(2, run_all, starts, tiny_data, vocab_file, timeout=300)
    for name in names:
        for row, wanted in zip(_rows(tmp_path / _folder(name)), expected, strict=True):
            assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2), (name, row["iteration"])
            assert row["skipped_steps"] == wanted["skipped_steps"], (name, row["iteration"])
            spikes = row.get("skipped_spikes", [])
            for spike, other in zip(spikes, wanted.get("skipped_spikes", []), strict=True):
                assert spike["name"] == other["name"], (name, row["iteration"])
                for number in ("value", "mean", "deviation"):
                    assert spike[number] == pytest.approx(other[number], rel=1e-2), (name, row["iteration"], number)

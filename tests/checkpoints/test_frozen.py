"""Checkpoints of runs with --param-groups: frozen weights resume in other layouts, and may be trained later."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import RankFailure, on_ranks

from .runs import Start, losses_of, run_all, whole_tensors

FROZEN: list[dict[str, Any]] = [
    {"pattern": "layers.[01].*", "frozen": True},
    {"pattern": "embedding.*", "frozen": True},
    {"pattern": "*.bias", "lr_factor": 0.5},
]
SCHEDULE = "--precision fp32 --batch-size 2 --save-interval 2 --zero-stage"


def _file(folder: Path, name: str, rules: list[dict[str, Any]]) -> str:
    (folder / name).write_text(json.dumps(rules))
    return f"--param-groups {folder / name}"


def _final(run_dir: Path) -> dict[str, Any]:
    return whole_tensors(sorted(run_dir.glob("**/iter_*"))[-1])


def test_frozen_weights_resume_in_another_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    groups, thawing = _file(tmp_path, "frozen.json", FROZEN), _file(tmp_path, "thawing.json", FROZEN[1:])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = Start("gpt2", whole, f"{SCHEDULE} 0 --gas 2 --train-iters 4 {groups}")
    on_ranks(1, run_all, [one], tiny_data, vocab_file)
    starts = [
        Start("gpt2", cut, f"{SCHEDULE} 0 --gas 2 --train-iters 2 --model-parallel-size 2 {groups}"),
        Start("gpt2", cut, f"{SCHEDULE} 1 --gas 1 --train-iters 4 {groups}"),
        Start("gpt2", tmp_path / "stages", f"{SCHEDULE} 0 --gas 2 --train-iters 2 --pipe-parallel-size 2 {groups}"),
        Start("gpt2", tmp_path / "stages", f"{SCHEDULE} 0 --gas 2 --train-iters 4 --pipe-parallel-size 2 {thawing}"),
    ]
    on_ranks(2, run_all, starts, tiny_data, vocab_file)
    np.testing.assert_allclose(losses_of(cut), losses_of(whole), rtol=1e-6)
    first, last = (whole_tensors(next(cut.glob(f"**/iter_000000{i}"))) for i in (2, 4))
    fixed = {key for key in first if "layers.0." in key or "layers.1." in key or key.startswith("weight.embedding")}
    assert all(np.array_equal(first[key], last[key]) for key in fixed)
    assert {key for key in first if key.startswith("exp_avg.")} == {
        key.replace("weight.", "exp_avg.", 1) for key in first if key.startswith("weight.") and key not in fixed
    }
    assert not any(np.array_equal(first[key], last[key]) for key in first if key not in fixed)

    with pytest.raises(RankFailure, match="--no-load-optim"):
        again = Start("gpt2", cut, f"{SCHEDULE} 1 --gas 1 --train-iters 6 {thawing}")
        on_ranks(2, run_all, [again], tiny_data, vocab_file)
    thawed = _final(tmp_path / "stages")
    assert "exp_avg.layers.0.mlp.dense_4h_to_h.weight" in thawed and "exp_avg.embedding" not in str(thawed.keys())

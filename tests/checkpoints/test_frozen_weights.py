"""Checkpoints of runs with --param-groups: frozen weights resume in other layouts, and may be trained later."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import RankFailure, covering, on_ranks

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


def test_frozen_weights_resume_in_another_layout(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    groups = _file(tmp_path, "frozen.json", FROZEN)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = Start("gpt2", whole, f"{SCHEDULE} 0 --gas 2 --train-iters 4 {groups}")
    on_ranks(1, run_all, [one], tiny_data, vocab_file)
    starts = [
        Start("gpt2", cut, f"{SCHEDULE} 0 --gas 2 --train-iters 2 --model-parallel-size 2 {groups}"),
        Start("gpt2", cut, f"{SCHEDULE} 1 --gas 1 --train-iters 4 {groups}"),
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


def test_a_checkpoint_keeps_the_base_sizes_of_mup(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """A run with muP resumes with the same base sizes, and refuses others by name."""

    def start(base: int, iters: int) -> Start:
        flags = f"{SCHEDULE} 0 --train-iters {iters} --mup-base-hidden-size {base} --mup-base-num-layers 2"
        return Start("gpt2", tmp_path, flags)

    on_ranks(1, run_all, [start(8, 2), start(8, 3)], tiny_data, vocab_file)
    with pytest.raises(RankFailure, match="--mup-base-hidden-size is 8 in the checkpoint and 4 in this run"):
        on_ranks(1, run_all, [start(4, 4)], tiny_data, vocab_file)


ZEROS = [(1, ""), (1, "--no-overlap-grad-reduce"), (1, "--pipe-parallel-size 2 --no-overlap-grad-reduce"), (3, "")]


@pytest.mark.parametrize("case", covering(ZEROS, [ZEROS[0], ZEROS[2]].__contains__), ids=str)
def test_weights_that_were_frozen_learn_as_in_one_process(
    case: tuple[int, str], tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """A weight that is trained from step 2 on has its own step count, also in ZeRO's shards and after a resume."""
    frozen, thawed = _file(tmp_path, "frozen.json", FROZEN), _file(tmp_path, "thawed.json", FROZEN[2:])

    def starts(folder: Path, flags: str) -> list[Start]:
        iters = [(2, frozen), (4, thawed), (6, thawed)]
        return [Start("gpt2", folder, f"{SCHEDULE} {flags} --train-iters {end} {rules}") for end, rules in iters]

    zero, layout = case
    gas = 2 if "pipe" in layout else 1
    on_ranks(1, run_all, starts(tmp_path / "one", "0 --gas 2"), tiny_data, vocab_file)
    on_ranks(2, run_all, starts(tmp_path / "two", f"{zero} {layout} --gas {gas}"), tiny_data, vocab_file)
    np.testing.assert_allclose(losses_of(tmp_path / "two"), losses_of(tmp_path / "one"), rtol=2e-6)
    for run_dir in (tmp_path / "one", tmp_path / "two"):
        optimizer = json.loads(next(run_dir.glob("**/iter_0000006/checkpoint.json")).read_text())["optimizer"]
        assert optimizer["step"] == 6 and optimizer["frozen"] == []
        assert set(optimizer["steps"].values()) == {4} and "embedding.word_embeddings.weight" in optimizer["steps"]


DECAY = 0.7
# Flags of the run before weights are frozen, while they are frozen, after another resume, and once they are trained.
LAYOUTS = {
    "zero 0, 1 and 2": ["--zero-stage 0", "--zero-stage 1", "--zero-stage 2", "--zero-stage 1"],
    "zero 3": ["--zero-stage 3", "--zero-stage 3", "--zero-stage 0", "--zero-stage 3"],
    "pipeline": ["", "--pipe-parallel-size 2", "--pipe-parallel-size 2 --zero-stage 1", "--pipe-parallel-size 2"],
    "tensor parallel": ["", "--model-parallel-size 2", "--model-parallel-size 2 --async-save", "--zero-stage 0"],
    "sgd": ["--optimizer sgd", "--optimizer sgd", "--optimizer sgd --zero-stage 2", "--optimizer sgd"],
    "muon": ["--optimizer muon", "--optimizer muon", "--optimizer muon --zero-stage 1", "--optimizer muon"],
    "bf16": [*["--precision bf16 --zero-stage 1"] * 2, "--precision bf16 --zero-stage 2", ""],
}  # fmt: skip


@pytest.mark.parametrize("name", covering([*LAYOUTS], ["zero 3"].__contains__))
def test_the_average_of_a_weight_that_is_frozen_continues(
    name: str, tmp_path: Path, tiny_data: str, vocab_file: str
) -> None:
    """Each step gives decay x average + (1 - decay) x weight, before, while and after weights are frozen."""
    frozen = _file(tmp_path, "frozen.json", [{"pattern": "layers.0.*", "frozen": True}, *FROZEN[1:]])
    thawed = _file(tmp_path, "thawed.json", FROZEN[2:])
    shared = f"--precision fp32 --batch-size 2 --gas 2 --num-layers 2 --save-interval 1 --ema-decay {DECAY}"
    phases = zip((thawed, frozen, frozen, thawed), LAYOUTS[name], (2, 4, 5, 7), strict=True)
    run_dir = tmp_path / "run"
    starts = [Start("gpt2", run_dir, f"{shared} {rules} {layout} --train-iters {end}") for rules, layout, end in phases]
    on_ranks(2, run_all, starts, tiny_data, vocab_file)
    before, *others = [whole_tensors(next(run_dir.glob(f"**/iter_000000{i}"))) for i in range(1, 8)]
    rounding = 2**-8 if name == "bf16" else 0.0  # a frozen weight has no fp32 copy
    for i, after in enumerate(others, 2):
        averages = {key.replace("weight.", "ema.", 1): key for key in after if key.startswith("weight.")}
        for key, weight in averages.items():
            expected = DECAY * before[key].astype(np.float64) + (1 - DECAY) * after[weight].astype(np.float64)
            atol = 1e-7 + rounding * np.abs(after[weight]).max()
            np.testing.assert_allclose(after[key], expected, rtol=1e-6, atol=atol, err_msg=f"{key} at {i}")
        before = after
    last = json.loads(next(run_dir.glob("**/iter_0000007/checkpoint.json")).read_text())["optimizer"]
    halfway = json.loads(next(run_dir.glob("**/iter_0000004/checkpoint.json")).read_text())["optimizer"]
    assert last["frozen"] == [] and set(halfway["frozen"]) <= set(halfway["without_moments"])

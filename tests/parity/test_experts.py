"""A model with mixtures of experts has the same losses, weights and token counts in every layout."""

import functools
import json
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.checkpoints.runs import Start, losses_of, run_all, whole_tensors
from tests.support import covering, on_ranks

STEPS, GLOBAL_BATCH = 2, 8
# Pipeline, data-, tensor-, context- and expert-parallel size; pp 0 means no pipeline.
GRIDS = [
    (0, 2, 1, 1, 2), (0, 2, 1, 1, 1), (2, 1, 1, 1, 1), (0, 1, 2, 1, 1), (1, 2, 1, 1, 2), (0, 1, 1, 2, 2),
    (0, 4, 1, 1, 2), (0, 4, 1, 1, 4), (0, 2, 2, 1, 2), (2, 2, 1, 1, 2), (2, 1, 2, 1, 1), (0, 2, 1, 2, 4),
    (0, 2, 1, 2, 2), (2, 1, 1, 2, 2), (1, 2, 2, 1, 2), (2, 2, 2, 1, 2), (2, 4, 1, 1, 2), (0, 2, 2, 2, 4),
    (0, 4, 2, 1, 2), (2, 1, 2, 2, 2),
]  # fmt: skip


class Case(NamedTuple):
    """A model with experts in a layout: kind of model, its flags, flags of the layout, world size and precision."""

    model: str
    flags: str
    layout: str
    world: int
    precision: str


def draw(seed: int) -> Case:
    """Draw a case; equal seeds give equal cases."""
    rng = random.Random(seed)
    pp, dp, tp, cp, ep = GRIDS[seed % len(GRIDS)]
    model = rng.choice(["gpt2", "llama"] if cp > 1 else ["gpt2", "llama", "llama", "t5-cpm", "t5-v1.1"])
    experts = rng.choice([ep, 4, 8]) if ep > 1 else rng.choice([1, 3, 4])
    flags = [f"--num-experts {experts} --experts-per-token {rng.randint(1, min(experts, 3))}"]
    flags += [f"--expert-ff-hidden-size {rng.choice([4, 12])} --init-method-std 0.2 --router-aux-loss 0.1"]
    flags += rng.choice([["--num-shared-experts 1"], ["--num-shared-experts 2 --shared-expert-gate"], []])
    flags += [f"--router-balance {rng.choice(['aux-loss', 'bias', 'none'])} --router-bias-rate 0.05"]
    flags += [f"--router-score {rng.choice(['softmax', 'sigmoid'])} --router-z-loss {rng.choice([0, 0.01])}"]
    flags += [rng.choice(["--normalize-expert-weights", "--no-normalize-expert-weights"])]
    flags += rng.choice([[], [], ["--moe-layer-frequency 2"], ["--moe-layer-frequency 0 1 1 1"]])
    if model.startswith("t5"):
        flags = [each for each in flags if "0 1 1 1" not in each]
    layout = [f"--pipe-parallel-size {pp} --model-parallel-size {tp} --context-parallel-size {cp}"]
    layout += [f"--expert-parallel-size {ep} --batch-size 2 --gas {GLOBAL_BATCH // 2 // dp}"]
    zero = rng.choice([0, 1]) if dp * cp > 1 else 0
    layout += [f"--zero-stage {zero}"] + rng.choice(
        [[], ["--sequence-parallel"]] if tp > 1 and cp == 1 and "t5" not in model else [[]]
    )
    schedules = ["1f1b", "gpipe", "zb-h1"]
    if not model.startswith("t5") and GLOBAL_BATCH // 2 // dp % 2 == 0:
        schedules.append("interleaved")
    schedule = rng.choice(schedules) if pp > 1 else "1f1b"
    layout += [f"--pipeline-schedule {schedule}"] + (["--virtual-pipeline-size 2"] if schedule == "interleaved" else [])
    layout += rng.choice([[], ["--checkpoint-activations"]] if schedule != "zb-h1" else [[]])
    precision = "fp64" if not zero and rng.random() < 0.7 else "fp32"
    return Case(model, " ".join(flags), " ".join(layout), max(pp, 1) * dp * tp * cp, precision)


def _start(case: Case, folder: Path, layout: str) -> Start:
    common = f"--train-iters {STEPS} --optimizer sgd --lr 0.3 --weight-decay 0.01 --save-at-end --save-interval 0"
    return Start(case.model, folder, f"{case.flags} {layout} {common} --precision {case.precision}")


def _router_losses(run_dir: Path) -> list[float]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["router_loss"] for row in rows if row.get("router_loss")]


@functools.cache
def _trained(numbers: tuple[int, ...], folder: Path, data: str, vocab_file: str) -> None:
    """Train all cases in one process and in their layouts, with one launch of ranks for each world size."""
    cases = {number: draw(number) for number in numbers}
    alone = f"--batch-size 2 --gas {GLOBAL_BATCH // 2} --zero-stage 0"
    on_ranks(1, run_all, [_start(c, folder / f"{n}-alone", alone) for n, c in cases.items()], data, vocab_file)
    for world in sorted({case.world for case in cases.values()}):
        starts = [_start(c, folder / str(n), c.layout) for n, c in cases.items() if c.world == world]
        on_ranks(world, run_all, starts, data, vocab_file, timeout=60 + 30 * len(starts))


BATCHES = [tuple(range(first, first + 5)) for first in range(0, 200, 5)]


@pytest.mark.parametrize("numbers", covering(BATCHES, BATCHES[:1].__contains__), ids=lambda n: f"{n[0]}-{n[-1]}")
def test_random_settings(numbers: tuple[int, ...], tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    _trained(numbers, tmp_path, tiny_data, vocab_file)
    for number in numbers:
        case, alone, here = draw(number), tmp_path / f"{number}-alone", tmp_path / str(number)
        tolerance = 1e-10 if case.precision == "fp64" else 1e-5
        np.testing.assert_allclose(losses_of(here), losses_of(alone), rtol=tolerance, err_msg=str(case))
        expected_losses = _router_losses(alone)
        np.testing.assert_allclose(_router_losses(here), expected_losses, rtol=10 * tolerance, err_msg=str(case))
        expected = whole_tensors(alone / "checkpoints" / f"iter_{STEPS:07d}")
        found = whole_tensors(here / "checkpoints" / f"iter_{STEPS:07d}")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value.dtype == np.int64:
                assert (found[key] == value).all(), (key, case)
            else:
                np.testing.assert_allclose(
                    found[key],
                    value,
                    atol=tolerance * 10 * max(1.0, float(np.abs(value).max())),
                    err_msg=f"{key} {case}",
                )


GROUPS = [
    '[{"pattern": "*experts.3.*", "lr_factor": 0.1}, {"pattern": "layers.1.*experts.0.*", "frozen": true}]',
    # Below the one expert that learns, no weight does, so no rank needs a gradient of its rows.
    '[{"pattern": "*", "frozen": true}, {"pattern": "layers.0.*experts.0.*", "frozen": false}, '
    '{"pattern": "final_norm*", "frozen": false}]',
]


@pytest.mark.parametrize("groups", covering(GROUPS, GROUPS[1:].__contains__), ids=["several", "one"])
def test_groups_of_single_experts(groups: str, tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """Weights of an expert that is on other ranks only can be frozen or get their own learning rate."""
    rules = tmp_path / "rules.json"
    rules.write_text(groups)
    flags = f"--num-experts 4 --init-method-std 0.2 --param-groups {rules}"
    case = Case("llama", flags, "", 4, "fp32")
    start = _start(case, tmp_path / "alone", f"--batch-size 2 --gas {GLOBAL_BATCH // 2}")
    on_ranks(1, run_all, [start], tiny_data, vocab_file)
    layout = "--pipe-parallel-size 2 --expert-parallel-size 2 --zero-stage 1 --batch-size 2 --gas 2"
    on_ranks(4, run_all, [_start(case, tmp_path / "here", layout)], tiny_data, vocab_file, timeout=100)
    np.testing.assert_allclose(losses_of(tmp_path / "here"), losses_of(tmp_path / "alone"), rtol=1e-5)

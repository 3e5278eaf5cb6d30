"""Runs whose global batch size changes: the same losses in every layout, also if they stop and resume in between."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training import log
from tds import engine_classes
from tds.schedule import ScheduleError
from tests.support import covering, on_ranks

from .runs import Start, losses_of, make, run_all

COMMON = "--split 9,1 --eval-iters 1 --eval-interval 5 --optimizer sgd --lr 0.1 --batch-size 2 --train-iters 6"
BASE = f"{COMMON} --batch-size-schedule '0:4 12_samples:8 24_samples:4'"  # iterations of 4, 4, 4, 8, 8 and 4 samples
PIPE = "--pipe-parallel-size 2 --pipeline-schedule"
EXACT = {
    "replicas": "",
    "tensor": "--model-parallel-size 2",
    "context": "--context-parallel-size 2",
    "1f1b": f"{PIPE} 1f1b",
    "zb-h1": f"{PIPE} zb-h1",
    "interleaved": f"{PIPE} interleaved --virtual-pipeline-size 2",
    "interleaved-odd": f"{PIPE} interleaved --virtual-pipeline-size 2 --batch-size 4",  # 1 or 2 micro-batches
}
SHARDED = {
    "zero-1": "--zero-stage 1",
    "zero-1-deepspeed": "--zero-stage 1 --no-overlap-grad-reduce",
    "zero-2": "--zero-stage 2",
    "zero-3": "--zero-stage 3",
}
WITH_FULL = ("1f1b", "interleaved", "zero-1-deepspeed", "zero-2")  # 1f1b and interleaved are in the resumed runs


def _always(name: str) -> bool:
    return name not in WITH_FULL


def rows(run_dir: Path, split: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["split"] == split]


def _run_with_a_clock(starts: Sequence[Start], data: str, vocab_file: str) -> None:
    """Do the runs `starts`; for their log lines, a second passes in each iteration."""
    seconds: list[int] = []
    before_step = log.TrainingLog.before_step

    def advance(self: log.TrainingLog, iteration: int) -> None:
        seconds.append(iteration)
        before_step(self, iteration)

    log.TrainingLog.before_step = advance  # type: ignore[method-assign]
    log.time = SimpleNamespace(perf_counter=lambda: float(len(seconds)))  # type: ignore[assignment]
    run_all(starts, data, vocab_file)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str) -> Path:
    """Train one process with a constant --gas in each of three starts, so that no schedule is involved."""
    run_dir = tmp_path_factory.mktemp("expected")
    parts = [(3, 2), (5, 4), (6, 2)]
    starts = [
        Start("gpt2", run_dir, f"{COMMON} --precision fp64 --train-iters {iterations} --gas {gas}")
        for iterations, gas in parts
    ]
    on_ranks(1, run_all, starts, tiny_data, vocab_file)
    return run_dir


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, tiny_data: str, vocab_file: str, request: pytest.FixtureRequest
) -> Path:
    """Train in all layouts on two ranks; some runs stop in the middle and continue in another layout."""
    full = request.config.getoption("--full")
    folder = tmp_path_factory.mktemp("found")
    fp64 = f"{BASE} --precision fp64"
    layouts = {name: f"{fp64} {flags}" for name, flags in EXACT.items()}
    layouts |= {name: f"{BASE} --precision fp32 {flags}" for name, flags in SHARDED.items()}
    starts = [
        Start("gpt2", folder / name, f"{flags} --no-save-at-end")
        for name, flags in layouts.items()
        if full or _always(name)
    ]
    starts += [
        Start("gpt2", folder / "resumed", f"{fp64} {PIPE} interleaved --virtual-pipeline-size 2 --exit-interval 4")
    ]
    starts += [Start("gpt2", folder / "resumed", fp64)]
    # The same sizes, written without those of the past.
    starts += [Start("gpt2", folder / "rewritten", f"{fp64} --exit-interval 4")]
    later = "--batch-size-schedule '0:8 24_samples:4'"
    starts += [Start("gpt2", folder / "rewritten", f"{fp64} {PIPE} 1f1b {later}")]
    starts += [Start("gpt2", folder / "skipped", f"{fp64} --skip-iterations 5 --skip-samples 30")]
    on_ranks(2, _run_with_a_clock, starts, tiny_data, vocab_file, timeout=240)
    return folder


@pytest.mark.parametrize("name", covering([*EXACT, "resumed", "rewritten"], _always))
def test_losses_are_those_of_one_process(name: str, expected: Path, found: Path) -> None:
    assert losses_of(found / name) == pytest.approx(losses_of(expected), rel=1e-10)


@pytest.mark.parametrize("name", covering(list(SHARDED), _always))
def test_losses_under_zero_are_those_of_one_process(name: str, expected: Path, found: Path) -> None:
    assert losses_of(found / name) == pytest.approx(losses_of(expected), rel=1e-5)


@pytest.mark.parametrize("name", covering([*EXACT, *SHARDED], _always))
def test_evaluation_uses_the_largest_size(name: str, expected: Path, found: Path) -> None:
    """After iteration 5, --gas 4 makes the same batch; after iteration 6, training had smaller batches again."""
    here, there = ({row["iteration"]: row["lm_loss"] for row in rows(run, "valid")} for run in (found / name, expected))
    assert here[5] == pytest.approx(there[5], rel=1e-5)
    of_replicas = {row["iteration"]: row["lm_loss"] for row in rows(found / "replicas", "valid")}
    assert here[6] == pytest.approx(of_replicas[6], rel=1e-5)
    assert here[6] != pytest.approx(there[6], rel=1e-5), "the last start of `expected` evaluates on fewer samples"


@pytest.mark.parametrize("name", covering(["replicas", "1f1b", "resumed", "rewritten"], _always))
def test_rows_count_samples(name: str, found: Path) -> None:
    train = rows(found / name)
    assert [row["consumed_samples"] for row in train] == [4, 8, 12, 20, 28, 32]
    assert [row["global_batch"] for row in train] == [4, 4, 4, 8, 8, 4]
    assert [row["consumed_tokens"] for row in train] == [24 * row["consumed_samples"] for row in train]
    assert [row["tokens_per_second"] for row in train] == [24 * row["global_batch"] for row in train]


def test_skipped_iterations_keep_their_samples(expected: Path, found: Path) -> None:
    train = rows(found / "skipped")
    assert [row["consumed_samples"] for row in train] == [4, 8, 12, 20, 28, 32]
    assert [row.get("passed_over", 0) for row in train] == [0, 0, 0, 0, 1, 1]
    assert losses_of(found / "skipped") == pytest.approx(losses_of(expected)[:4], rel=1e-10)


def _refused(start: Start, data: str, vocab_file: str) -> list[int]:
    """Make a run whose schedule would deadlock with one micro-batch; return the numbers of which proofs were tried."""
    tried = []

    def prove(schedule: Any, engine: Any) -> None:
        tried.append(engine.micro_batches)
        if engine.micro_batches == 1:
            raise ScheduleError("deadlock")

    engine_classes.prove_no_deadlock = prove  # type: ignore[attr-defined]
    with pytest.raises(ScheduleError):
        make(start, data, vocab_file)
    return tried


def test_all_sizes_are_proven_before_training(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    sizes = "--batch-size-schedule '0:4 8_samples:8 16_samples:2 24_samples:6'"
    start = Start("gpt2", tmp_path, f"{COMMON} {sizes} --precision fp32 --pipe-parallel-size 1")
    assert on_ranks(1, _refused, start, tiny_data, vocab_file) == [[2, 1]], "4 was proven when the engine was made"

"""Progress output of runs and tools: numbers, time left, and no carriage returns in log files."""

from typing import Any

import pytest

from data_utils import progress
from megatron.training.console import TimeLeft, format_count, format_duration, training_line

ROW: dict[str, Any] = {
    "iteration": 10,
    "lm_loss": 8.0849,
    "lr": 2e-4,
    "grad_norm": 1.352,
    "loss_scale": None,
    "skipped_steps": 0,
    "consumed_tokens": 20480,
    "tokens_per_second": 4074.2,
    "tflops": 0.0173,
    "mfu": None,
    "memory_mb": 462.0,
}


def test_the_line_has_what_a_run_is_watched_by() -> None:
    line = training_line(ROW, 500, 0.503, 246.4, when=0)
    assert line.split(" | ", 1)[1].split(" | ") == [
        "iteration  10/500", "loss  8.0849", "lr 2.00e-04", "grad norm   1.352", "    4,074 tokens/s", "   4:06 left",
    ]  # fmt: skip
    other = ROW | {"loss_scale": 65536.0, "mfu": 0.412, "z_loss": 1e-4, "grad_norm": None, "skipped_steps": 2}
    columns = training_line(other, 500, 0.503, 246.4).split(" | ")
    assert {"loss scale    65536", "MFU 41.2%", "z loss 1.00e-04", "grad norm     inf", "2 skipped steps"} <= set(
        columns
    )
    layers = {"layers.0": {"imbalance": 1.5, "dead_experts": 0}, "layers.1": {"imbalance": 2.25, "dead_experts": 3}}
    routed = training_line(ROW | {"router_loss": 0.02, "layers": layers}, 500, 0.503, 246.4).split(" | ")
    assert {"router loss 2.00e-02", "imbalance  2.25", "3 dead experts"} <= set(routed)
    details = set(training_line(ROW, 500, 0.503, 246.4, details=True).split(" | ")) - set(line.split(" | "))
    assert {"  2.0%", "20.5K tokens", "   503 ms", "  0.0173 TFLOP/s", "  0.46 GB"} <= details
    on_a_cpu = training_line(ROW | {"memory_before_model_mb": 262.0}, 500, 0.503, 246.4, details=True)
    assert "  0.46 GB (0.20 GB since the model)" in on_a_cpu.split(" | ")


@pytest.mark.parametrize("last", [10, 500, 500_000])
def test_a_line_fits_into_120_columns(last: int) -> None:
    late = ROW | {"iteration": last, "lm_loss": 12.5, "grad_norm": 412.125, "tokens_per_second": 912_345.0}
    for row in (ROW, late, late | {"skipped_steps": 0}):
        assert len(training_line(row, last, 0.5, 35_000.0)) <= 120


@pytest.mark.parametrize("details", [False, True])
def test_columns_stand_below_each_other(details: bool) -> None:
    late = ROW | {"iteration": 10_000, "lm_loss": 12.5, "grad_norm": 412.125, "consumed_tokens": 1.6e12}
    late |= {"tokens_per_second": 912_345.0, "tflops": 412.3, "memory_mb": 71_234.0}
    lines = [training_line(*each, details) for each in ((ROW, 10_000, 0.5, 9.0), (late, 10_000, 12.5, 35_000.0))]
    bars = [[i for i, letter in enumerate(line) if letter == "|"] for line in lines]
    assert bars[0] == bars[1], "\n".join(lines)


def test_numbers_are_short() -> None:
    assert [format_count(n) for n in (0, 999, 999.9, 20480, 999_960, 1.02e6, 3.4e12)] == [
        "0",
        "999",
        "1.00K",
        "20.5K",
        "1.00M",
        "1.02M",
        "3.40T",
    ]
    assert [format_duration(s) for s in (5, 245, 11045, 183845, float("inf"))] == [
        "0:05",
        "4:05",
        "3:04:05",
        "2d 03:04:05",
        "?",
    ]


def test_time_left_counts_evaluations_but_not_the_start() -> None:
    left = TimeLeft()
    assert left.estimate(10, 100, 2.0, now=1000.0) == 180  # the first estimate: 90 iterations of 2 s are left
    assert left.estimate(20, 100, 2.0, now=1050.0) == 400  # 80 are left; the last 10 took 50 s


def test_a_tool_writes_no_carriage_return_into_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert list(progress.Progress([1, 2], desc="scoring", unit=" documents")) == [1, 2]
    with progress.Progress(desc="tokenizing", unit="B", total=4000, initial=1000) as bar:
        bar.set_note("5k tokens/s")
        bar.update(1000)
    assert list(progress.Progress([1], desc="scoring", unit=" documents", disable=True)) == [1]
    said = capsys.readouterr().err
    assert "\r" not in said
    lines = said.splitlines()
    assert lines[0].startswith("scoring: 1") and "documents in 0 s" in lines[0]
    assert lines[2] == "tokenizing: 2.00k of 4.00k (50%) B in 0 s, 5k tokens/s"
    assert len(lines) == 3


def test_no_tool_draws_a_bar_of_its_own() -> None:
    """Only progress.py and the training loop call tqdm; both prevent its carriage returns in log files."""
    from tests.support import ROOT

    users = [
        p.name
        for room in ("data_utils", "megatron")
        for p in sorted((ROOT / room).rglob("*.py"))
        if "tqdm(" in p.read_text()
    ]
    assert users == ["progress.py", "loop.py"]
    assert "disable = None if is_rank_0() else True" in (ROOT / "megatron/training/loop.py").read_text()

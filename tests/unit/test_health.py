"""Skipped steps and loss jumps are detected, although losses are read from the device only at intervals."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.checkpointing import TrainState
from megatron.data.sampler import ConsecutiveSampler
from megatron.data.skips import Skips, parse_ranges
from megatron.engines.engine import StepResult
from megatron.training import find_nonfinite
from megatron.training.health import Health, SampleRange
from megatron.training.metrics import MetricsWriter
from tds.optimizers import skip_unless_finite

NAN, INF = math.nan, math.inf


def feed(health: Health, norms: list[Any], scales: list[float | None] | None = None, losses: Any = None) -> None:
    for i, norm in enumerate(norms):
        loss = torch.tensor(losses[i] if losses else 2.0, dtype=torch.float64)
        scale = scales[i] if scales else None
        step = StepResult(loss, norm, scale, skip_is_known=bool(scales) and not math.isfinite(norm))
        health.add(step, SampleRange(i + 1, 8 * i, 8), TrainState(i + 1, 8 * i + 8))


def test_a_step_is_skipped_if_its_norm_is_not_finite_or_the_host_knows_it() -> None:
    rows = [(1.0, False, False), (NAN, False, True), (torch.tensor(INF), False, True), (1.0, True, True)]
    for norm, skip_is_known, expected in rows:
        assert StepResult(torch.tensor(2.0), norm, None, skip_is_known).skipped is expected


def test_steps_in_a_row_are_counted_over_reads() -> None:
    health = Health(TrainState(), 3)
    feed(health, [1.0, torch.tensor(NAN), torch.tensor(INF), 1.0, NAN])
    found = health.read()
    assert (found.skipped, found.norms, health.fault) == (3, [1.0, 1.0], None)
    assert health.state_to_save(TrainState(5)).iteration == 4
    feed(health, [NAN, NAN])
    health.read()
    assert health.fault is not None
    assert health.fault.streak == 3


def test_a_streak_begins_before_an_iteration_that_a_flag_skips() -> None:
    """Iterations 2, 4 and 5 are skipped for their gradients and 3 by a flag: to continue, skip 2 to 5."""
    health = Health(TrainState(), 3)
    feed(health, [1.0, NAN])
    health.skip(TrainState(3, 24))
    for iteration in (4, 5):
        step = StepResult(torch.tensor(2.0), NAN, None, skip_is_known=False)
        health.add(step, SampleRange(iteration, 8 * iteration - 8, 8), TrainState(iteration, 8 * iteration))
    health.read()
    assert health.fault is not None
    assert (health.fault.first, health.fault.samples.iteration, health.fault.streak) == (2, 5, 3)


def test_a_loss_that_is_none_with_a_gradient_that_is_one() -> None:
    health = Health(TrainState(), 3)
    feed(health, [1.0, 1.0], losses=[1.0, NAN])
    health.read()
    assert health.fault is not None
    assert (health.fault.samples.iteration, health.fault.streak) == (2, 0)


def test_fp16_may_search_for_its_scale_and_ends_at_the_least_one() -> None:
    health = Health(TrainState(), 2, 64.0, 1.0)
    feed(health, [INF] * 6 + [1.0], [32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0])
    assert health.read().skipped == 6
    assert health.fault is None
    assert health.state_to_save(TrainState(9)).iteration == 9, "the scale that was found so far is worth a checkpoint"
    feed(health, [INF], [1.0])
    health.read()
    assert health.fault is not None
    assert health.fault.min_scale == 1.0
    later = Health(TrainState(), 2, 64.0, 1.0)
    feed(later, [1.0, INF, INF], [64.0, 32.0, 16.0])
    later.read()
    assert later.fault is not None
    assert later.fault.min_scale is None


def test_skipped_steps_of_a_resumed_fp16_run_count_from_the_first_one() -> None:
    """The optimizer has made steps, so the initial loss scale is no longer searched for."""
    health = Health(TrainState(10, 80), 3, 64.0, 1.0, has_stepped=True)
    feed(health, [INF] * 4, [32.0, 16.0, 8.0, 4.0])
    health.read()
    assert health.fault is not None
    assert (health.fault.samples.iteration, health.fault.streak, health.fault.min_scale) == (3, 3, None)


def test_jumps_are_named_and_noise_is_not() -> None:
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(0.05).add(3.0).tolist()
    noise[120] = 4.5
    health = Health(TrainState(), 3)
    feed(health, [1.0] * 200, losses=noise)
    (spike,) = health.read().spikes
    assert str(spike.samples) == "iteration 121 (samples 960 to 967)"
    assert spike.median == pytest.approx(3.0, abs=0.05)
    falling = Health(TrainState(), 3)
    feed(falling, [1.0] * 60, losses=[10 * 0.9**i for i in range(60)])
    assert falling.read().spikes == []


def test_metrics_stay_json(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path), 0, True)
    writer.write({"iteration": 1, "lm_loss": NAN, "spikes": [{"a": INF}], "b": {"c": (-INF, 1.0)}})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"iteration": 1, "lm_loss": null, "spikes": [{"a": null}], "b": {"c": [null, 1.0]}}\n'
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_passed_over_iterations_leave_the_others_their_samples(replicas: int) -> None:
    skips = Skips(parse_ranges(["2"]), parse_ranges(["15-16"]))
    read = []
    for rank in range(replicas):
        sampler = ConsecutiveSampler(
            2, 4 // replicas // 2, rank, replicas, 0, lambda n: skips.should_skip(n // 4 + 1, n, 4)
        )
        micros = iter(sampler)
        read.append([next(micros) for _ in range(3 * (4 // replicas // 2))])
    flat = sorted(n for rank in read for micro in rank for n in micro)
    assert flat == [*range(4), *range(8, 12), *range(20, 24)], (
        "iteration 2, and those of samples 15 and 16, are left out"
    )


@pytest.mark.parametrize("kind", ["adam", "adam fp64", "sgd"])
def test_an_optimizer_is_told_to_change_nothing(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(5, dtype=torch.float64 if "64" in kind else torch.float32))
    optimizer = (
        torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        if kind == "sgd"
        else torch.optim.AdamW([weight], lr=0.1, fused=True)
    )

    def step(gradient: float) -> list[bytes]:
        weight.grad = torch.full_like(weight, gradient)
        skip_unless_finite(optimizer, weight.grad.norm())
        optimizer.step()
        optimizer.zero_grad()
        state = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
        return [t.detach().numpy().tobytes() for t in (weight, *state)]

    first = step(1.0)
    assert step(NAN) == first
    assert step(INF) == first
    assert step(1.0) != first


def test_a_first_scale_that_falls_to_its_minimum_is_explained_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the run succeeds, so none of the skipped steps counts; the reason is the scale, not the loss."""
    health = Health(TrainState(), 9, 2.0, 1.0)
    feed(health, [INF] * 2, [1.0, 1.0], losses=[NAN] * 2)
    health.read()
    assert health.fault is not None
    assert (health.fault.streak, health.fault.min_scale) == (0, 1.0)
    monkeypatch.setattr(find_nonfinite, "wait_for_weights", lambda engine: None)
    monkeypatch.setattr(find_nonfinite, "gather_findings", lambda *_: [find_nonfinite.Finding(0, "layer.weight", None)])
    monkeypatch.setattr(find_nonfinite.mpu, "get_mesh", lambda: SimpleNamespace(share=SimpleNamespace(size=1)))
    engine = SimpleNamespace(deepspeed=SimpleNamespace(module=None))
    message = find_nonfinite.explain_fault(SimpleNamespace(engine=engine), health.fault)  # type: ignore[arg-type]
    assert "layer.weight" in message and "--precision bf16" in message

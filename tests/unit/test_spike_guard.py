"""The spike guard makes the decisions of a plain computation with torch.std_mean."""

import json
import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpointing import TrainState
from megatron.checkpointing.schema import SchemaError, _check_state
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.engines.engine import StepResult
from megatron.features.spike_guard import Guard
from megatron.training.health import Health, SampleRange
from megatron.training.remote_datasets import RemoteDataset, stage_begins
from tds._deepspeed import DeepSpeedOptimizer
from tds.spikes import Deviation, SpikeGuard

from .test_clip import deepspeeds_muon


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)


def _steps(number: int) -> list[tuple[float, float]]:
    """Return losses and gradient norms that fall with noise, with spikes of each of them, and a NaN."""
    noise = torch.randn(number, 2, generator=torch.Generator().manual_seed(0)).double()
    steps = [(3 - 0.01 * i + 0.1 * a, 1 + 0.2 * b) for i, (a, b) in enumerate(noise.tolist())]
    for at, loss, norm in ((3, 9.0, 9.0), (20, 5.0, 1.0), (21, 2.0, 7.0), (40, 5.0, 5.0), (50, 2.0, math.nan)):
        steps[at] = (loss, norm)
    return steps


def _guard(sigma: float, window: int) -> SpikeGuard:
    engine: Any = SimpleNamespace(optimizer=None, spike_guard=None)
    return SpikeGuard(engine, sigma, window)


def _decide(guard: SpikeGuard, loss: float, norm: float) -> bool:
    guard.begin(torch.tensor(loss))
    return math.isinf(guard.inf_if_spike(torch.tensor(norm)))


def test_numbers_are_not_rounded() -> None:
    """A norm that a pipeline engine has read to the host is compared in fp64, as norms on the device are."""
    guard, third = _guard(4.0, 16), 1 / 3
    guard.begin(torch.tensor(third, dtype=torch.float64))
    guard.inf_if_spike(third)
    assert guard.recent[-1] == (third, third)


def test_decisions_are_those_of_plain_statistics() -> None:
    """A step is skipped if its loss or gradient norm exceeds mean + sigma x std of the window.

    The window holds only steps that were not skipped.
    """
    guard, window, skipped = _guard(4.0, 16), deque[tuple[float, float]](maxlen=16), []
    for at, step in enumerate(_steps(60)):
        spike = False
        if len(window) >= 8:
            std, mean = torch.std_mean(torch.tensor(list(window), dtype=torch.float64), dim=0)
            spike = bool((torch.tensor(step) > mean + 4.0 * std).any())
        if not spike and math.isfinite(step[1]):
            window.append(step)
        assert _decide(guard, *step) == spike, at
        skipped += [at] if spike else []
    assert {20, 21, 40} <= set(skipped)
    assert 3 not in skipped, "there are too few steps to compare with"
    assert torch.tensor(list(guard.recent)).allclose(torch.tensor(list(window)))


def test_a_skipped_step_does_not_call_the_optimizer_that_deepspeed_wraps() -> None:
    """DeepSpeed's Muon would step weights without gradients, too."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = DeepSpeedOptimizer()
    optimizer.optimizer = deepspeeds_muon([weight])
    engine: Any = SimpleNamespace(optimizer=optimizer)
    guard = SpikeGuard(engine, 4.0, 4)
    is_applied = []
    for norm in (1.0, 1.1, 9.0, math.nan, 1.0):
        before = weight.detach().clone()
        weight.grad = torch.ones(2)
        optimizer._global_grad_norm = norm
        guard.begin(torch.tensor(1.0))
        optimizer.optimizer.step()
        is_applied.append(not torch.equal(weight, before))
    assert is_applied == [True, True, False, False, True]


def _feature(guard: SpikeGuard) -> Guard:
    feature = Guard()
    feature._guard = guard
    return feature


def test_a_resumed_guard_decides_as_one_that_went_on() -> None:
    steps, whole = _steps(60), _guard(4.0, 16)
    decisions = [_decide(whole, *step) for step in steps]
    first, second = _guard(4.0, 16), _guard(4.0, 16)
    for step in steps[:20]:
        _decide(first, *step)
    stored = json.loads(json.dumps(TrainState(features={"spike_guard": _feature(first).state()}).to_dict()))
    _check_state(stored)
    _feature(second).load(TrainState.from_dict(stored).features["spike_guard"])
    assert [_decide(second, *step) for step in steps[20:]] == decisions[20:]
    assert second.recent == whole.recent


def _attached_to_a_run(feature: Guard, consumed: int, batch: int) -> Guard:
    """Return the feature in a run that has consumed `consumed` samples; data stages begin at samples 0 and 40."""
    run: Any = SimpleNamespace(
        state=TrainState(consumed_samples=consumed),
        global_batch_size=batch,
        sample_shape=(32, 0),
        datasets=(RemoteDataset(None, [0, 40]), None, None),
    )
    feature.start(run)
    return feature


@pytest.mark.parametrize(
    ("consumed", "batch", "is_kept"),
    [(24, 8, True), (24, 16, True), (36, 8, False), (40, 8, False), (48, 8, True), (24, 4, False)],
)
def test_other_data_and_smaller_batches_are_not_compared_with_steps_before(
    consumed: int, batch: int, is_kept: bool
) -> None:
    """The step that reads the first sample of a stage, and a resume with a smaller batch, begin a new window."""
    first = _feature(_guard(4.0, 16))
    _attached_to_a_run(first, 0, 8).before_step(1)
    for loss, norm in _steps(60)[4:20]:
        _decide(first._guard, loss, norm)
    resumed = _feature(_guard(4.0, 16))
    resumed.load(json.loads(json.dumps(first.state())))
    _attached_to_a_run(resumed, consumed, batch).before_step(2)
    assert _decide(resumed._guard, 9.0, 9.0) == is_kept, "it is a spike only in the old window"
    for _ in range(8):
        _decide(resumed._guard, 9.0, 9.0)
    assert _decide(resumed._guard, 99.0, 99.0), "the new window finds spikes, too"


def test_a_checkpoint_of_version_0_2_0_resumes_the_guard() -> None:
    stored = {"iteration": 4, "consumed_samples": 8, "recent": [[2.0, 1.0], [2.5, 1.5]]}
    _check_state(stored)
    guard = _guard(4.0, 16)
    _feature(guard).load(TrainState.from_dict(stored).features["spike_guard"])
    assert list(guard.recent) == [(2.0, 1.0), (2.5, 1.5)]


@pytest.mark.parametrize("recent", [3, [[1.0]], [[1.0, math.inf]], [[1.0, "2"]]])
def test_a_damaged_window_is_refused(recent: Any) -> None:
    with pytest.raises(SchemaError, match=r"state\.recent"):
        _check_state({"iteration": 1, "consumed_samples": 1, "recent": recent})
    with pytest.raises(ValueError, match=r"spike_guard\.recent"):
        _feature(_guard(4.0, 16)).load({"recent": recent})
    with pytest.raises(ValueError, match=r"spike_guard\.batch_tokens"):
        _feature(_guard(4.0, 16)).load({"recent": [[2.0, 1.0]], "batch_tokens": "32"})


def test_a_streak_of_spikes_ends_the_run_also_at_the_smallest_loss_scale() -> None:
    """Spikes count as skipped steps, but not as overflows of fp16, whose loss scale is at its minimum here."""
    spike = Deviation("loss", 9.0, 2.0, 0.5, 128)
    health = Health(TrainState(), 3, 1.0, 1.0)
    for i in range(3):
        assert health.fault is None
        step = StepResult(torch.tensor(9.0), math.inf, 1.0, True, spike=spike)
        health.add(step, SampleRange(i + 1, 8 * i, 8), TrainState(i + 1))
        health.read()
    assert health.fault is not None
    assert (health.fault.streak, health.fault.min_scale, health.fault.spike) == (3, None, spike)
    assert "14.0 standard deviations" in str(spike)


@pytest.mark.parametrize(
    "flags", ["--skip-step-window 64", "--skip-step-sigma 0", "--skip-step-sigma 6 --skip-step-window 3"]
)
def test_settings_without_effect_are_refused(flags: str) -> None:
    with pytest.raises(ConfigError, match="--skip-step"):
        parse(flags.split())


def test_an_attribute_of_a_users_data_set_is_no_data_stage() -> None:
    assert stage_begins(SimpleNamespace(begins=[0, 64])) == ()
    assert stage_begins(RemoteDataset(None, [0, 64])) == [0, 64]

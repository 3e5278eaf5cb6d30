"""On accelerators, training does not synchronise with the device needlessly; tested with stand-ins for a device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tds
from megatron.engines.engine import end_step
from tds import _deepspeed, progress, start
from tds.schedule import Forward
from tests.sentences import SENTENCES


class Event:
    """A stand-in for torch.Event: `record` stores the time `now`, and all events are complete if `done` is True."""

    now, done, waited = 0.0, False, 0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.done

    def synchronize(self) -> None:
        Event.waited += not Event.done

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.at - self.at)


def test_a_breakdown_waits_for_the_device_only_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time breakdown does not wait for the device within a step, when other ranks may need this rank's message."""
    monkeypatch.setattr(progress.torch, "Event", Event)
    found = progress.Progress(torch.device("meta"), None, breakdown=True)
    for _ in range(3):
        found.begin(Forward(0))
        Event.now += 2.0
        found.end(Forward(0))
    assert found.step(1, 4, {}) is None and not Event.waited and len(found._event_pairs) == 3
    Event.done = True
    assert found.step(2, 4, {}) is None and not found._event_pairs, "what is done is not kept"
    found.begin("eval_batch")
    found.begin(Forward(0))
    Event.now += 2.0
    found.end(Forward(0))
    assert found.take() == {"Forward": 6.0} and not Event.waited, "evaluations are not counted"


def test_a_progress_line_counts_the_steps_and_samples_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resume between two lines, the first line has fewer steps; batch sizes may differ."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = progress.Progress(torch.device("cpu"), 10, breakdown=False)
    lines = []
    for step in range(1008, 1021):
        found.begin("train_batch")
        now[0] += 0.1
        found.end("train_batch")
        now[0] += 5.0  # between two steps, such as for a checkpoint
        lines.append(found.step(step, 80 if step == 1020 else 8, {}))
    assert lines[2] and "iter time (s): 0.100 samples/sec: 80.000" in lines[2]
    assert lines[12] and "iter time (s): 0.100 samples/sec: 152.000" in lines[12]  # (9 x 8 + 80) samples in 1 second
    assert lines.count(None) == 11


def test_each_rank_may_be_shown_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_deepspeed, "on_cpu", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for shown, wanted in ((8, "3"), (4, "3"), (1, "0")):
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setattr(_deepspeed.torch.accelerator, "device_count", lambda shown=shown: shown)
        _deepspeed.set_local_rank()
        assert _deepspeed.os.environ["LOCAL_RANK"] == wanted
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(_deepspeed.torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=SENTENCES["has_local_rank_3_but_this"]):
        _deepspeed.set_local_rank()


def test_a_norm_on_the_cpu_goes_to_the_loss() -> None:
    """A gradient norm on the CPU, as with an offloaded ZeRO-3 optimizer, moves to the loss's device.

    A single copy to the CPU can then fetch norm and loss together.
    """
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(),
        fp16_enabled=lambda: False,
        spike_guard=None,
        weight_average=None,
        module=torch.nn.Module(),
    )
    step = end_step(engine, torch.zeros((), device="meta"), torch.ones(()), {})
    assert isinstance(step.grad_norm, torch.Tensor) and step.grad_norm.device == step.loss.device


def test_calls_that_block_are_refused_under_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = SimpleNamespace(
        num_stages=2,
        device=torch.device("cuda"),
        fp16_enabled=lambda: False,
        _config=SimpleNamespace(pipeline={}, torch_autocast_enabled=False, _param_dict={}),
        module=SimpleNamespace(activation_checkpoint_interval=0, seed_layers=False),
    )
    start._refuse_settings(engine)
    engine.module = SimpleNamespace(activation_checkpoint_interval=1, seed_layers=True)
    with pytest.raises(ValueError, match="use tds.PipelineModule, or leave activation_checkpoint_interval out"):
        start._refuse_settings(engine)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match=SENTENCES["cuda_launch_blocking_1_lets_a"]):
        start._refuse_settings(engine)


def _waits(timers: dict[str, Any]) -> bool:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9, **timers}
    engine = tds.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)[0]
    return bool(engine.tput_timer.config.synchronized)


def test_deepspeeds_timer_of_throughput_waits_only_if_it_is_told_to() -> None:
    from tests.support import on_ranks

    assert on_ranks(1, _waits, {}) == [False]
    assert on_ranks(1, _waits, {"timers": {"throughput": {"enabled": True, "synchronized": True}}}) == [True]

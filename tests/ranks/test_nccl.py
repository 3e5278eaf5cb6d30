"""Pipelines do not hang and losses are right if nccl.py emulates NCCL's message order and asynchronous execution."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tds
from tds._torch import new_local_group
from tests.conformance.cases import CASES, Case
from tests.conformance.engines import remembered_groups, train
from tests.support import covering, on_ranks

from .nccl import Device, nccl

TOLERANCE = 1e-12
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "extra_warmup": 1},
    {"schedule": "gpipe"},
    {"schedule": "interleaved"},
    {"schedule": "zb-h1"},
]
NAMES = (
    "(grad, bool, float)",
    "an encoder-decoder whose two halves send different tuples",
    "token ids as inputs, a tied embedding and two more tied layers",
    "a weight as an output, tied over stages",
    "another size each step",
    "another size each micro-batch",
    "dynamic_shape, another size each micro-batch",
    "an output that is the same memory each time",
    "a data iterator that fills the same tensors again",
    "layers that change one of several tensors in place",
)
BY_NAME = {case.name: case for case in CASES}


def _tasks() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield (case, pipeline settings): the first case with every schedule, and each other case with one schedule."""
    plain = BY_NAME[NAMES[0]]
    for pipeline in SCHEDULES:
        for micros in (1, 5):
            yield dataclasses.replace(plain, rows=((4,) * micros,) * 2), pipeline
    for number, name in enumerate(NAMES[1:]):
        yield BY_NAME[name], SCHEDULES[number % len(SCHEDULES)]


@contextmanager
def _as_on(device: Device) -> Iterator[None]:
    """Make the engine follow its rules for accelerators although the backend is gloo."""
    made: dict[tuple[int, ...], Any] = {}

    def host_group(group: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in made:
            made[ranks] = new_local_group(ranks, "gloo")
            device.hosts.add(made[ranks])
        return made[ranks]

    with pytest.MonkeyPatch.context() as patch:
        for home in (tds.engine, tds.neighbours, tds.queues, tds.start):
            patch.setattr(home, "has_message_queues", lambda device: True)
        for home in (tds.engine, tds.neighbours):
            patch.setattr(home, "host_group", host_group)
        yield


def _errors(rules: str, stages: int) -> list[tuple[str, float]]:
    found = []
    with remembered_groups() as begin, nccl(rules) as device, _as_on(device):
        for case, pipeline in _tasks():
            begin()
            device.loaded.clear()
            what = f"{pipeline}, {len(case.rows[0])} micro-batches, {case.name}"
            try:
                found.append((what, max(train("tds", case, stages, 1, pipeline, torch.float64))))
            except Exception as error:
                raise RuntimeError(what) from error
    return found


GRID = [(rules, stages) for rules in ("eager", "lazy", "one queue", "loading") for stages in (2, 3, 4)]
IN_CI = [("eager", 3)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", covering(GRID, lambda each: each in IN_CI), ids=lambda each: f"{each[0]}-{each[1]}")
def test_every_schedule_ends_with_the_numbers_of_one_process(where: tuple[str, int]) -> None:
    rules, stages = where
    for found in on_ranks(stages, _errors, rules, stages, timeout=240):
        assert len(found) == 2 * len(SCHEDULES) + len(NAMES) - 1
        assert not [each for each in found if not each[1] <= TOLERANCE]


# ------------------------------------------------------- synchronisation with the device within a step


def _waits(pipeline: dict[str, Any], stages: int) -> list[float]:
    """Return the losses of a pipeline that synchronises its devices at each allocation and before each pass."""
    torch.manual_seed(0)
    with nccl("eager") as device, _as_on(device), pytest.MonkeyPatch.context() as patch:
        chunks = 2 if pipeline["schedule"] == "interleaved" else 1
        layers = [torch.nn.Linear(4, 4) for _ in range(stages * chunks)]
        net = tds.PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, chunks=chunks)
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "gradient_clipping": 0.0,
            "pipeline": {**pipeline, "timeout": 20},
        }  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]

        def after_a_wait(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                device.finish()
                return function(*args)

            return call

        for name in ("_forward", "_backward", "_backward_input", "_backward_weight"):
            patch.setattr(engine, name, after_a_wait(getattr(engine, name)))
        patch.setattr(tds.memory.BufferPool, "take", after_a_wait(tds.memory.BufferPool.take))
        patch.setattr(tds.channel.Sender, "_pack", after_a_wait(tds.channel.Sender._pack))
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            batches = [tuple(torch.randn(2, 4, generator=generator) for _ in "xy") for _ in range(8)]
            losses.append(engine.train_batch(iter(batches)).item())
            engine.eval_batch(iter(batches))
        return losses


@pytest.mark.parametrize("pipeline", [*SCHEDULES, {"schedule": "1f1b", "extra_warmup": 2}], ids=str)
@pytest.mark.parametrize("stages", covering([2, 3, 4], lambda stages: stages == 3))
def test_waits_for_the_whole_device_end(pipeline: dict[str, Any], stages: int) -> None:
    """A step ends without a deadlock even if all stages synchronise their devices at all points of the step.

    torch's CUDA allocator, for example, synchronises when memory is short.
    """
    schedule = pipeline["schedule"]
    found = on_ranks(stages, _waits, pipeline, stages)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(stages * (1 + (schedule == "interleaved")))))
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        batches = [tuple(torch.randn(2, 4, generator=generator) for _ in "xy") for _ in range(8)]
        loss = torch.stack([torch.nn.functional.mse_loss(model(x), y) for x, y in batches]).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(loss.item())
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------- the emulation itself


def _receive_first(groups: int) -> bool:
    """Post a receive and then a send on each of two ranks; return whether the send completes within 2 s.

    groups: 1 if sends and receives share one process group, 2 if each direction has its own group.
    """
    made = [dist.new_group([0, 1]) for _ in range(groups)]
    me = dist.get_rank()
    with nccl("eager"):
        arrived = torch.empty(3)
        dist.irecv(arrived, 1 - me, group=made[0 if me else -1])
        sent = dist.isend(torch.full((3,), float(me)), 1 - me, group=made[-1 if me else 0])
        return bool(sent.done.wait(2.0))


@pytest.mark.parametrize("groups", [1, 2])
def test_what_hangs_on_nccl_hangs_here(groups: int) -> None:
    assert on_ranks(2, _receive_first, groups) == [groups == 2] * 2


def _too_early() -> tuple[bool, list[float]]:
    """Send two buffers; overwrite the first one at once, and the second one after `wait`.

    Returns whether `is_completed` was true too early, and the sums of the received buffers (none on the sender).
    """
    with nccl("eager") as device:
        device.lateness = 1.0
        if dist.get_rank() == 0:
            early, late = torch.ones(2), torch.ones(2)
            first, second = dist.isend(early, 1), dist.isend(late, 1)
            early.fill_(7)
            done = first.is_completed()
            second.wait()
            late.fill_(7)
            return done, []
        early, late = torch.zeros(2), torch.zeros(2)
        works = [dist.irecv(early, 0), dist.irecv(late, 0)]
        for work in works:
            work.wait()
        done = works[1].is_completed()
        return done, [early.sum().item(), late.sum().item()]


def test_a_message_reads_its_memory_late_and_waiting_blocks_only_what_is_computed() -> None:
    assert on_ranks(2, _too_early) == [(False, []), (False, [14.0, 2.0])]


def _meets_late() -> bool:
    """Return whether the first message of rank 0 blocks until rank 1 posts its own first message."""
    group, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    with nccl("lazy"):
        if dist.get_rank() == 1:
            store.wait(["seen"])
            dist.irecv(torch.ones(1), 0, group=group).wait()
            return True
        asking = threading.Thread(target=lambda: dist.isend(torch.ones(1), 1, group=group))
        asking.start()
        asking.join(0.5)
        blocked = asking.is_alive()
        store.set("seen", "1")
        asking.join()
        return blocked


def test_the_first_message_of_a_pair_blocks_in_lazy_mode() -> None:
    assert on_ranks(2, _meets_late) == [True, True]

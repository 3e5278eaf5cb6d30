"""An iterator in which the first stage sends each target to the last, as diffusion trainers do with their noise."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import on_ranks

from .common import MICROS, Batch, config, library, linears, mse, plain, samples, sgd, trained


class SharedTargets:
    """Iterator whose targets the last stage gets from the first: only there they are the ones of `samples`."""

    def __init__(self, way: str, first: int = 0, last: int = 1) -> None:
        self.way = way
        self.first = first
        self.last = last
        self.source = samples()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        inputs, target = next(self.source)
        is_first = dist.get_rank() == self.first
        target = target if is_first else torch.zeros_like(target)
        if self.way == "broadcast":
            dist.broadcast(target, self.first)
        elif is_first:
            dist.send(target, self.last)
        else:
            dist.recv(target, self.first)
        return inputs, target


class CountedMse:
    """Sum of squared errors, with the count by which tds divides it."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum()

    def count_targets(self, labels: Tensor) -> int:
        return labels.numel()


def _load_first() -> None:
    """Let stock DeepSpeed load a micro-batch before it exchanges messages, as clients with such iterators patch it."""
    from deepspeed.runtime.pipe import schedule

    honest = schedule.TrainSchedule.steps

    def steps(self: Any) -> Iterator[list[Any]]:
        for commands in honest(self):
            yield sorted(commands, key=lambda each: not isinstance(each, schedule.LoadMicroBatch))

    schedule.TrainSchedule.steps = steps


def _stock() -> list[float]:
    deepspeed = library("stock")
    _load_first()
    net = deepspeed.PipelineModule(linears(), num_stages=2, loss_fn=mse, partition_method="uniform")
    engine = deepspeed.initialize(model=net, optimizer=sgd(net), config=config())[0]
    data = SharedTargets("broadcast")
    return [engine.train_batch(data).item() for _ in range(3)]


def test_stock_deepspeed_with_the_clients_patch() -> None:
    expected = plain(linears())
    for found in on_ranks(2, _stock):
        assert found == pytest.approx(expected[:3], rel=1e-5)


def _ours(schedule: str, dynamic: bool, way: str, counted: bool) -> list[float]:
    tds = library("tds")
    chunks = 2 if schedule == "interleaved" else 1
    loss: Any = CountedMse() if counted else mse
    net = tds.PipelineModule(
        linears(), num_stages=2, loss_fn=loss, partition_method="uniform", dynamic_shape=dynamic, chunks=chunks
    )
    settings = config(pipeline={"schedule": schedule, "timeout": 5})
    return trained(tds.initialize(model=net, optimizer=sgd(net), config=settings)[0], SharedTargets(way))


def _backwards_first(stage: int, stages: int, micros: int) -> Iterator[Any]:
    """Yield a schedule that finishes each micro-batch before the next, so stage 0 waits for the last stage."""
    import tds

    order: list[Any] = []
    for micro in range(micros):
        order += [tds.schedule.Forward(micro), tds.schedule.Backward(micro)]
    return tds.schedule.with_messages(order, stage, stages)


def _every_schedule() -> list[list[float]]:
    import tds

    tds.schedule.register("one at a time", _backwards_first)
    found = []
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "one at a time"):
        for dynamic in (False, True):
            found.append(_ours(schedule, dynamic, "send" if dynamic else "broadcast", False))
    return [*found, _ours("1f1b", False, "send", True)]


def test_first_and_last_stage_read_in_step_with_every_schedule() -> None:
    expected = plain(linears())
    for rank in on_ranks(2, _every_schedule):
        for found in rank:
            assert found == pytest.approx(expected, rel=1e-5)


def _one_replica_ends() -> list[float]:
    """Train on 2 stages x 2 replicas; the second replica's first iterator ends a step earlier."""
    tds = library("tds")
    net = tds.PipelineModule(linears(), num_stages=2, loss_fn=mse, partition_method="uniform")
    engine = tds.initialize(model=net, optimizer=sgd(net), config=config(pipeline={"timeout": 10}))[0]
    replica = dist.get_rank() % 2
    ends = itertools.islice(SharedTargets("send", replica, replica + 2), MICROS * (2 - replica))
    found = [engine.train_batch(ends).item()]
    with pytest.raises(tds.DataEnded):
        engine.train_batch(ends)
    data = SharedTargets("send", replica, replica + 2)
    return [*found, engine.train_batch(data).item()]


def test_all_ranks_skip_a_step_for_which_one_replica_has_no_data() -> None:
    net = linears()
    expected = plain(net, data=itertools.chain(itertools.islice(samples(), MICROS), samples()), steps=1)
    for found in on_ranks(4, _one_replica_ends):
        assert found == pytest.approx(expected, rel=1e-5)

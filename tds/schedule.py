"""When each pipeline stage computes and talks: schedules as plain sequences of instructions.

This file knows nothing of tensors, ranks or DeepSpeed, so a whole schedule can be printed,
drawn and checked on a laptop.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Instruction:
    """One thing that a stage does; `micro` is the number of the micro-batch it does it for."""

    micro: int


class Forward(Instruction):
    """Run this stage's layers."""


class Backward(Instruction):
    """Differentiate this stage's layers."""


class SendActivation(Instruction):
    """Give the outputs to the next stage; returns without waiting for it."""


class RecvActivation(Instruction):
    """Wait for the inputs from the previous stage."""


class SendGrad(Instruction):
    """Give the gradients of the inputs to the previous stage; returns without waiting for it."""


class RecvGrad(Instruction):
    """Wait for the gradients of the outputs from the next stage."""


Schedule = Callable[[int, int, int], Iterator[Instruction]]


def one_forward_one_backward(stage: int, stages: int, micros: int, extra_warmup: int = 0) -> Iterator[Instruction]:
    """What `stage` does for one optimizer step: 1F1B with a flush (Narayanan et al. 2019, 2021).

        stage 0 | F0 F1 F2       B0 F3 B1    B2    B3
        stage 1 |    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2 |       F0 B0 F1 B1 F2 B2 F3 B3

    A stage is `stages - 1 - stage` micro-batches ahead before its first backward pass, then
    alternates. At a boundary the gradient goes up before the next activation comes down, and
    both sides keep that order.

    extra_warmup n makes it (1 + n) times as far ahead ("eager" 1F1B for n = 1, Zhuang et al.
    2023): in classic 1F1B every stage waits for a message that has only just been sent, with
    more micro-batches in flight the next one is there already. It costs the activations of
    those micro-batches, see `in_flight`.
    """
    warmup = min((stages - 1 - stage) * (1 + extra_warmup), micros)
    for i in range(warmup):
        yield from _forward(stage, stages, i)
    for i in range(micros - warmup):
        yield from _forward(stage, stages, i + warmup, send=False)
        if stage < stages - 1:
            yield RecvGrad(i)
            yield SendActivation(i + warmup)
        yield from _backward(stage, i)
    for i in range(micros - warmup, micros):
        if stage < stages - 1:
            yield RecvGrad(i)
        yield from _backward(stage, i)


def gpipe(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """All forward passes, then all backward passes (Huang et al. 2019): simple, and as much memory as micro-batches.

    stage 0 | F0 F1 F2 F3             B0 B1 B2 B3
    stage 1 |    F0 F1 F2 F3       B0 B1 B2 B3
    stage 2 |       F0 F1 F2 F3 B0 B1 B2 B3
    """
    for i in range(micros):
        yield from _forward(stage, stages, i)
    for i in range(micros):
        if stage < stages - 1:
            yield RecvGrad(i)
        yield from _backward(stage, i)


def forward_only(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """What `stage` does to evaluate: all micro-batches straight through."""
    for i in range(micros):
        yield from _forward(stage, stages, i)


def _forward(stage: int, stages: int, i: int, send: bool = True) -> Iterator[Instruction]:
    if stage > 0:
        yield RecvActivation(i)
    yield Forward(i)
    if send and stage < stages - 1:
        yield SendActivation(i)


def _backward(stage: int, i: int) -> Iterator[Instruction]:
    yield Backward(i)
    if stage > 0:
        yield SendGrad(i)


def in_flight(stage: int, stages: int, micros: int, extra_warmup: int = 0) -> int:
    """The most micro-batches whose activations `stage` keeps at once under 1F1B."""
    return min((stages - 1 - stage) * (1 + extra_warmup) + 1, micros)


def schedule_of(settings: Mapping[str, Any]) -> Schedule:
    """The schedule that `"pipeline": {"schedule": ..., "extra_warmup": ...}` of a ds_config names; 1f1b by default.

    Raises ValueError for an unknown name, or a warm-up for a schedule without one.
    """
    name, extra = settings.get("schedule", "1f1b"), settings.get("extra_warmup", 0)
    if name not in NAMES:
        raise ValueError(f"there is no pipeline schedule {name!r}; there are {', '.join(NAMES)}")
    if not isinstance(extra, int) or extra < 0 or (extra and name != "1f1b"):
        raise ValueError(f"extra_warmup {extra!r} does not fit the schedule {name}: 1f1b takes 0, 1, 2 ..., others 0")
    return gpipe if name == "gpipe" else partial(one_forward_one_backward, extra_warmup=extra)


NAMES = ("1f1b", "gpipe")

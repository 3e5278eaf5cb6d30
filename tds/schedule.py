"""When each pipeline stage computes and talks: schedules as plain sequences of instructions.

This file knows nothing of tensors, ranks or DeepSpeed, so a whole schedule can be printed,
drawn and checked on a laptop.
"""

from collections.abc import Iterator
from dataclasses import dataclass


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


def one_forward_one_backward(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """What `stage` does for one optimizer step: 1F1B with a flush (Narayanan et al. 2019, 2021).

        stage 0 | F0 F1 F2       B0 F3 B1    B2    B3
        stage 1 |    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2 |       F0 B0 F1 B1 F2 B2 F3 B3

    A stage is `stages - 1 - stage` micro-batches ahead before its first backward pass, then
    alternates. At a boundary the gradient goes up before the next activation comes down, and
    both sides keep that order.
    """
    first, last = stage == 0, stage == stages - 1
    warmup = min(stages - 1 - stage, micros)

    def forward(i: int) -> Iterator[Instruction]:
        if not first:
            yield RecvActivation(i)
        yield Forward(i)

    def backward(i: int) -> Iterator[Instruction]:
        yield Backward(i)
        if not first:
            yield SendGrad(i)

    for i in range(warmup):
        yield from forward(i)
        yield SendActivation(i)
    for i in range(micros - warmup):
        yield from forward(i + warmup)
        if not last:
            yield RecvGrad(i)
            yield SendActivation(i + warmup)
        yield from backward(i)
    for i in range(micros - warmup, micros):
        if not last:
            yield RecvGrad(i)
        yield from backward(i)


def forward_only(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """What `stage` does to evaluate: all micro-batches straight through."""
    for i in range(micros):
        if stage > 0:
            yield RecvActivation(i)
        yield Forward(i)
        if stage < stages - 1:
            yield SendActivation(i)


def in_flight(stage: int, stages: int, micros: int) -> int:
    """The most micro-batches whose activations `stage` keeps at once under 1F1B."""
    return min(stages - stage, micros)

"""Pipeline schedules as plain sequences of instructions: when each stage computes and communicates.

A schedule sets the order of a stage's passes. `with_messages` adds a receive before each pass whose input comes from
another stage, and a send after each pass whose result goes to another stage. This file knows nothing of tensors,
ranks or DeepSpeed, so a whole schedule can be printed, drawn and checked on a laptop.

A stage may hold several chunks of the model. A micro-batch goes through virtual stages in order; chunk c of stage
s is virtual stage c x stages + s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple


class MicroChunk(NamedTuple):
    """A micro-batch on one of the chunks of a stage."""

    micro: int
    chunk: int = 0


@dataclass(frozen=True)
class Instruction:
    """One operation of a stage, for one micro-batch and one chunk."""

    micro: int
    chunk: int = 0

    @cached_property
    def micro_chunk(self) -> MicroChunk:
        """The micro-batch and chunk of this instruction."""
        return MicroChunk(self.micro, self.chunk)


class Forward(Instruction):
    """Forward pass of a chunk."""


class Backward(Instruction):
    """Backward pass of a chunk: gradients of inputs and weights."""


class BackwardInput(Instruction):
    """First half of a backward pass: only gradients of the inputs, for which the previous stage waits."""


class BackwardWeight(Instruction):
    """Second half of a backward pass: gradients of the weights, for which no other stage waits."""


class SendActivation(Instruction):
    """Non-blocking send of the outputs to the next virtual stage."""


class RecvActivation(Instruction):
    """Receive of the inputs from the previous virtual stage."""


class SendGrad(Instruction):
    """Non-blocking send of the inputs' gradients to the previous virtual stage."""


class RecvGrad(Instruction):
    """Receive of the outputs' gradients from the next virtual stage."""


Kind = type[Instruction]
Schedule = Callable[[int, int, int], Iterator[Instruction]]
Plan = Sequence[Sequence[Instruction]]  # the instructions of every stage


def num_chunks(plan: Plan) -> int:
    """Return the number of chunks that each stage of a plan has."""
    instructions = chain.from_iterable(plan)
    return 1 + max((each.chunk for each in instructions), default=0)


def make_plan(schedule: Schedule, stages: int, micros: int) -> Plan:
    """Return the instructions of all stages in a step of `micros` micro-batches."""
    return [list(schedule(stage, stages, micros)) for stage in range(stages)]


class ScheduleError(ValueError):
    """A schedule that is incomplete or deadlocks; the message names stage and instruction."""


def one_forward_one_backward(stage: int, stages: int, micros: int, extra_warmup: int = 0) -> Iterator[Instruction]:
    """Yield the instructions of `stage` for one optimizer step: 1F1B with a flush (Narayanan et al. 2019, 2021).

        stage 0 | F0 F1 F2       B0 F3 B1    B2    B3
        stage 1 |    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2 |       F0 B0 F1 B1 F2 B2 F3 B3

    A stage begins with `stages - 1 - stage` forward passes, the warm-up. Then one forward and one backward pass
    alternate, until only backward passes are left. Stage s keeps the activations of stages - s micro-batches.

    With extra_warmup n, the warm-up is 1 + n times as long, but at most `micros` passes ("eager" 1F1B for n = 1, Zhuang
    et al. 2023). Then the message for which a stage would wait has already arrived, and more activations are kept.
    """
    warmup = (stages - 1 - stage) * (1 + extra_warmup)
    forward = list(map(Forward, range(micros)))
    backward = list(map(Backward, range(micros)))
    return with_messages(alternate(forward, backward, warmup), stage, stages)


def alternate(forward: Sequence[Instruction], backward: Sequence[Instruction], warmup: int) -> list[Instruction]:
    """Return `warmup` forward passes, then one forward and one backward pass in turn, as long as there are any."""
    order = list(forward[:warmup])
    for i, backward_pass in enumerate(backward):
        order += forward[warmup + i : warmup + i + 1]  # one pass, or none if no forward pass is left
        order.append(backward_pass)
    return order


def forward_only(stage: int, stages: int, micros: int, chunks: int = 1) -> Iterator[Instruction]:
    """Yield the instructions of `stage` for an evaluation: forward passes only."""
    order = [Forward(*each) for each in forward_order(stages, micros, chunks)]
    return with_messages(order, stage, stages, chunks)


def forward_order(stages: int, micros: int, chunks: int) -> list[tuple[int, int]]:
    """Return the (micro, chunk) pairs in the order of the forward passes, which is the same on every stage.

    Micro-batches go through the chunks in groups of `stages` to 2 * `stages` - 1. With a smaller group, the first stage
    would wait for micro-batches from the last. For example, 5 of them on 2 stages form the groups (0, 1) and (2, 3, 4).
    """
    order = []
    num_groups = max(micros // stages, 1)
    for index in range(num_groups):
        group = range(micros * index // num_groups, micros * (index + 1) // num_groups)
        for chunk in range(chunks):
            order += [(micro, chunk) for micro in group]
    return order


def with_messages(order: Iterable[Instruction], stage: int, stages: int, chunks: int = 1) -> Iterator[Instruction]:
    """Yield `order` with sends and receives added where its passes need them.

    A receive comes right before the pass that uses its data, and a send right after the pass that computes its data.
    """
    last_virtual_stage = stages * chunks - 1
    for compute in order:
        virtual_stage = compute.chunk * stages + stage
        micro_chunk = compute.micro_chunk
        if isinstance(compute, Forward):
            if virtual_stage > 0:
                yield RecvActivation(*micro_chunk)
            yield compute
            if virtual_stage < last_virtual_stage:
                yield SendActivation(*micro_chunk)
        elif isinstance(compute, BackwardWeight):  # no other stage needs its result
            yield compute
        else:  # Backward or BackwardInput
            if virtual_stage < last_virtual_stage:
                yield RecvGrad(*micro_chunk)
            yield compute
            if virtual_stage > 0:
                yield SendGrad(*micro_chunk)


BUILT_IN = ("1f1b", "gpipe", "interleaved", "zb-h1")
_CUSTOM: dict[str, Schedule] = {}


def register(name: str, schedule: Schedule) -> None:
    """Register a custom schedule under `"pipeline": {"schedule": name}` of a ds_config, before `initialize`.

    schedule: (stage, stages, micros) -> instructions with messages (see `with_messages`), for one chunk per
    stage. The schedule is checked before the first step, like the built-in schedules. Raises ValueError if `name` is
    the name of a built-in schedule.
    """
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is the name of a built-in schedule: register your schedule under another name")
    _CUSTOM[name] = schedule


def find_schedule(settings: Mapping[str, Any], chunks: int = 1) -> Schedule:
    """Return the schedule that `"pipeline": {"schedule": ..., "extra_warmup": ...}` of a ds_config names.

    The default is 1f1b. chunks: number of chunks of the model on each stage; only `interleaved` supports several.
    Raises ValueError for an unknown name, or for settings that the schedule does not support.
    """
    name = settings.get("schedule", "1f1b")
    extra_warmup = settings.get("extra_warmup", 0)
    names = [*BUILT_IN, *_CUSTOM]
    if name not in names:
        raise ValueError(f"there is no pipeline schedule {name!r}; choose one of {', '.join(names)}")
    is_count = isinstance(extra_warmup, int) and extra_warmup >= 0
    is_supported = is_count and (name == "1f1b" or extra_warmup == 0)
    if not is_supported:
        raise ValueError(
            f"extra_warmup {extra_warmup!r} is not supported by the schedule {name}: "
            f"1f1b supports 0, 1, 2 ..., every other schedule only 0"
        )
    if chunks > 1 and name != "interleaved":
        raise ValueError(f"a model with {chunks} chunks a stage needs the schedule interleaved, not {name}")
    if name == "1f1b":
        return partial(one_forward_one_backward, extra_warmup=extra_warmup)
    from . import other_schedules

    schedules: dict[str, Schedule] = {
        **_CUSTOM,
        "gpipe": other_schedules.gpipe,
        "interleaved": partial(other_schedules.interleaved, chunks=chunks),
        "zb-h1": other_schedules.zero_bubble,
    }
    return schedules[name]

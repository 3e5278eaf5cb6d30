"""When each pipeline stage computes and talks: schedules as plain sequences of instructions.

A schedule says in which order a stage computes; `with_messages` puts a receive before and a send
after every pass that needs one. This file knows nothing of tensors, ranks or DeepSpeed, so a
whole schedule can be printed, drawn and checked on a laptop.

A stage may hold several chunks of the model: chunk c of stage s is number c x stages + s of the
virtual stages that a micro-batch goes through one after another.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple


class At(NamedTuple):
    """A micro-batch on one of the chunks of a stage."""

    micro: int
    chunk: int = 0


@dataclass(frozen=True)
class Instruction:
    """One thing that a stage does; for which micro-batch, with which of its chunks."""

    micro: int
    chunk: int = 0

    @cached_property
    def at(self) -> At:
        """(micro-batch, chunk)."""
        return At(self.micro, self.chunk)


class Forward(Instruction):
    """Run the layers of the chunk."""


class Backward(Instruction):
    """Differentiate them: gradients of inputs and of weights."""


class BackwardInput(Instruction):
    """Only the gradients of the inputs, for which the stage before waits."""


class BackwardWeight(Instruction):
    """Gradients of the weights, for which nobody waits; after BackwardInput."""


class SendActivation(Instruction):
    """Give the outputs to the next virtual stage; returns without waiting for it."""


class RecvActivation(Instruction):
    """Wait for the inputs from the previous virtual stage."""


class SendGrad(Instruction):
    """Give the gradients of the inputs to the previous virtual stage; returns without waiting for it."""


class RecvGrad(Instruction):
    """Wait for the gradients of the outputs from the next virtual stage."""


Schedule = Callable[[int, int, int], Iterator[Instruction]]
Plan = Sequence[Sequence[Instruction]]  # the instructions of every stage


class ScheduleError(ValueError):
    """A schedule that cannot work; the message names stage and instruction."""


def one_forward_one_backward(stage: int, stages: int, micros: int, extra_warmup: int = 0) -> Iterator[Instruction]:
    """What `stage` does for one optimizer step: 1F1B with a flush (Narayanan et al. 2019, 2021).

        stage 0 | F0 F1 F2       B0 F3 B1    B2    B3
        stage 1 |    F0 F1    B0 F2 B1 F3 B2    B3
        stage 2 |       F0 B0 F1 B1 F2 B2 F3 B3

    A stage is `stages - 1 - stage` micro-batches ahead before its first backward pass, then
    alternates. extra_warmup n makes it (1 + n) times as far ahead ("eager" 1F1B for n = 1,
    Zhuang et al. 2023): in classic 1F1B every stage waits for a message that has only just been
    sent, with more micro-batches in flight the next one is there already. It costs the
    activations of those micro-batches: stage s keeps (stages - 1 - s)(1 + n) + 1 of them.
    """
    warmup = min((stages - 1 - stage) * (1 + extra_warmup), micros)
    order: list[Instruction] = [Forward(i) for i in range(warmup)]
    for i in range(micros - warmup):
        order += [Forward(i + warmup), Backward(i)]
    return with_messages([*order, *(Backward(i) for i in range(micros - warmup, micros))], stage, stages)


def gpipe(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """All forward passes, then all backward passes (Huang et al. 2019): simple, and as much memory as micro-batches.

    stage 0 | F0 F1 F2 F3             B0 B1 B2 B3
    stage 1 |    F0 F1 F2 F3       B0 B1 B2 B3
    stage 2 |       F0 F1 F2 F3 B0 B1 B2 B3
    """
    return with_messages([*(Forward(i) for i in range(micros)), *(Backward(i) for i in range(micros))], stage, stages)


def interleaved(stage: int, stages: int, micros: int, chunks: int = 2) -> Iterator[Instruction]:
    """1F1B over several chunks a stage (Narayanan et al. 2021): 1/chunks of the bubble for chunks times the messages.

    Micro-batches go through the chunks in groups of `stages`: the first group through chunk 0,
    then through chunk 1 ..., then the next group. A pass is 1/chunks as long as in 1F1B, and so
    is the wait at either end. Where the stages do not divide the micro-batches, groups are
    larger, and so is the memory.
    """
    forward, backward = _through_chunks(stages, micros, chunks)
    group = -(-micros // max(micros // stages, 1))
    warmup = min((stages - 1 - stage) * 2 + (chunks - 1) * group, micros * chunks)
    order: list[Instruction] = [Forward(*each) for each in forward[:warmup]]
    for forward_at, backward_at in zip(forward[warmup:], backward, strict=False):
        order += [Forward(*forward_at), Backward(*backward_at)]
    rest = backward[len(forward) - warmup :]
    return with_messages([*order, *(Backward(*each) for each in rest)], stage, stages, chunks)


def zero_bubble(stage: int, stages: int, micros: int) -> Iterator[Instruction]:
    """ZB-H1 (Qi et al. 2023): 1F1B whose backward pass is cut in two, so that weight gradients fill the wait.

        stage 0 | F0 F1 F2       B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1 |    F0 F1    B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2 |       F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    The gradient of the inputs (B) goes up the pipeline as soon as it can; stage s is s weight
    gradients (W) late. A stage keeps no more micro-batches than the first one does in 1F1B, and the
    bubble shrinks from (stages - 1)(F + B + W) to (stages - 1)(F + B - W).
    """
    warmup = min(stages - 1 - stage, micros)
    order: list[Instruction] = [Forward(i) for i in range(warmup)]
    for i in range(micros):
        if i + warmup < micros:
            order.append(Forward(i + warmup))
        order.append(BackwardInput(i))
        if i >= stage:
            order.append(BackwardWeight(i - stage))
    order += [BackwardWeight(i) for i in range(max(micros - stage, 0), micros)]
    return with_messages(order, stage, stages)


def forward_only(stage: int, stages: int, micros: int, chunks: int = 1) -> Iterator[Instruction]:
    """What `stage` does to evaluate: all micro-batches straight through."""
    forward, _ = _through_chunks(stages, micros, chunks)
    return with_messages([Forward(*each) for each in forward], stage, stages, chunks)


def _through_chunks(stages: int, micros: int, chunks: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(micro, chunk) in the order of the forward and of the backward passes, the same on every stage.

    In groups of `stages` micro-batches, or a few more where the division leaves a rest: with
    fewer, a stage would come to a pass whose input is still to go round.
    """
    count = max(micros // stages, 1)
    ends = [micros * i // count for i in range(count + 1)]
    groups = [range(*each) for each in pairwise(ends)]
    forward = [(i, c) for group in groups for c in range(chunks) for i in group]
    backward = [(i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    return forward, backward


def with_messages(order: Iterable[Instruction], stage: int, stages: int, chunks: int = 1) -> Iterator[Instruction]:
    """Receive right before the pass that needs it, send right after the pass that made it."""
    last = stages * chunks - 1
    for each in order:
        virtual_stage = each.chunk * stages + stage
        at = each.micro, each.chunk
        if isinstance(each, Forward):
            if virtual_stage > 0:
                yield RecvActivation(*at)
            yield each
            if virtual_stage < last:
                yield SendActivation(*at)
        elif isinstance(each, BackwardWeight):
            yield each
        else:
            if virtual_stage < last:
                yield RecvGrad(*at)
            yield each
            if virtual_stage > 0:
                yield SendGrad(*at)


NAMES = ("1f1b", "gpipe", "interleaved", "zb-h1")
_ADDED: dict[str, Schedule] = {}


def register(name: str, schedule: Schedule) -> None:
    """Let `"pipeline": {"schedule": name}` of a ds_config mean a schedule of one's own, for one chunk a stage; before `initialize`.

    schedule: (stage, stages, micros) -> instructions, messages included (`with_messages` puts them in). It is checked as ours
    are before the first step. Raises ValueError for a name of ours.
    """
    if name in NAMES:
        raise ValueError(f"{name!r} is a schedule of tds: give yours another name")
    _ADDED[name] = schedule


def schedule_of(settings: Mapping[str, Any], chunks: int = 1) -> Schedule:
    """The schedule that `"pipeline": {"schedule": ..., "extra_warmup": ...}` of a ds_config names; 1f1b by default.

    chunks: how many the model has on each stage; more than one is what `interleaved` is for.
    Raises ValueError for an unknown name, or for what the schedule has no use for.
    """
    name, extra = settings.get("schedule", "1f1b"), settings.get("extra_warmup", 0)
    if name not in NAMES and name not in _ADDED:
        raise ValueError(f"there is no pipeline schedule {name!r}; there are {', '.join([*NAMES, *_ADDED])}")
    if not isinstance(extra, int) or extra < 0 or (extra and name != "1f1b"):
        raise ValueError(f"extra_warmup {extra!r} does not fit the schedule {name}: 1f1b takes 0, 1, 2 ..., others 0")
    if name == "interleaved":
        return partial(interleaved, chunks=chunks)
    if chunks > 1:
        raise ValueError(f"a model with {chunks} chunks a stage needs the schedule interleaved, not {name}")
    return {"gpipe": gpipe, "zb-h1": zero_bubble, **_ADDED}.get(name) or partial(
        one_forward_one_backward, extra_warmup=extra
    )

"""What can be known of a schedule before it runs: that it ends, what it keeps in memory, when each thing happens."""

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

Plan = Sequence[Sequence[Instruction]]  # the instructions of every stage
SENT_BY = {RecvActivation: (-1, SendActivation), RecvGrad: (1, SendGrad)}  # where a message comes from
PASSES = {Forward: "F", Backward: "B", BackwardInput: "B", BackwardWeight: "W"}


class ScheduleError(ValueError):
    """A schedule that cannot work; the message names stage and instruction."""


@dataclass(frozen=True)
class Span:
    """One pass of one micro-batch over one chunk of a stage. kind: F, B or W."""

    stage: int
    micro: int
    chunk: int
    kind: str
    begin: float
    end: float


def chunks_of(plan: Plan) -> int:
    return 1 + max((i.chunk for stage in plan for i in stage), default=0)


def check(plan: Plan, micros: int) -> None:
    """Raise ScheduleError unless every micro-batch goes once each way, messages match, and nobody waits for ever.

    Every border between two virtual stages has a process group of its own for either direction.
    On it, one end only sends and the other only receives, and gloo and NCCL both match the n-th
    send with the n-th receive. So it is enough that both ends name the micro-batches in the same
    order, which is checked here, and that the stages do not wait in a circle, which `times` finds.
    """
    chunks = chunks_of(plan)
    for stage, instructions in enumerate(plan):
        found = [type(i) for i in instructions if type(i) in PASSES]
        split = BackwardInput in found or BackwardWeight in found
        backward = (BackwardInput, BackwardWeight) if split else (Backward,)
        trains = any(kind is not Forward for kind in found)
        for chunk in range(chunks):
            for compute in (Forward, *backward) if trains else (Forward,):
                done = sorted(i.micro for i in instructions if type(i) is compute and i.chunk == chunk)
                if done != list(range(micros)):
                    raise ScheduleError(
                        f"stage {stage}: {compute.__name__} runs for {done}, not once for each of {micros}"
                    )
            _check_order(instructions, stage, chunk)
            _check_messages(plan, stage, chunk, chunks)
    times(plan)


def _check_order(instructions: Sequence[Instruction], stage: int, chunk: int) -> None:
    """Forward, then backward, then weights; the micro-batches of each in rising order, as messages are expected."""
    done: dict[type, int] = {}
    for each in instructions:
        kind = type(each)
        if each.chunk != chunk:
            continue
        before = {Backward: Forward, BackwardInput: Forward, BackwardWeight: BackwardInput}.get(kind)
        if each.micro != done.get(kind, 0) or (before and done.get(before, 0) <= each.micro):
            raise ScheduleError(
                f"stage {stage}: {kind.__name__}({each.micro}) of chunk {chunk} stands too early or too late"
            )
        done[kind] = each.micro + 1


def _check_messages(plan: Plan, stage: int, chunk: int, chunks: int) -> None:
    stages = len(plan)
    for kind, (hop, sender) in SENT_BY.items():
        place = chunk * stages + stage + hop
        received = [i.micro for i in plan[stage] if type(i) is kind and i.chunk == chunk]
        sent = []
        if 0 <= place < stages * chunks:
            there = plan[place % stages]
            sent = [i.micro for i in there if type(i) is sender and i.chunk == place // stages]
        if received != sent:
            raise ScheduleError(
                f"stage {stage} receives {kind.__name__} of {received}, stage {place % stages} sends {sent}"
            )


def times(
    plan: Plan, forward: float = 1.0, backward: float = 2.0, message: float = 0.0, weight: float | None = None
) -> list[Span]:
    """When each pass runs, if sends never block. Raises ScheduleError for a circle of stages that wait.

    forward, backward: time of a pass over a whole stage. weight: the part of `backward` that
    computes gradients of weights, by default half of it. message: time on the way.
    """
    chunks, stages = chunks_of(plan), len(plan)
    weight = backward / 2 if weight is None else weight
    cost = {Forward: forward, Backward: backward, BackwardInput: backward - weight, BackwardWeight: weight}
    todo = [list(reversed(stage)) for stage in plan]
    clock = [0.0] * stages
    arrival: dict[tuple[int, type, int], float] = {}
    spans: list[Span] = []
    while any(todo):
        moved = False
        for stage, rest in enumerate(todo):
            while rest:
                head = rest[-1]
                kind, place = type(head), head.chunk * stages + stage
                if kind in SENT_BY:
                    hop, sender = SENT_BY[kind]
                    if (place + hop, sender, head.micro) not in arrival:
                        break
                    clock[stage] = max(clock[stage], arrival[place + hop, sender, head.micro])
                elif kind in PASSES:
                    begin = clock[stage]
                    clock[stage] += cost[kind] / chunks
                    spans.append(Span(stage, head.micro, head.chunk, PASSES[kind], begin, clock[stage]))
                else:
                    arrival[place, kind, head.micro] = clock[stage] + message
                rest.pop()
                moved = True
        if not moved:
            waiting = ", ".join(f"stage {s} at {type(r[-1]).__name__}({r[-1].micro})" for s, r in enumerate(todo) if r)
            raise ScheduleError(f"the stages wait for each other for ever: {waiting}")
    return spans


def most_in_flight(instructions: Sequence[Instruction]) -> int:
    """The most micro-batches (of one chunk each) whose activations a stage keeps at once."""
    alive = most = 0
    for each in instructions:
        alive += isinstance(each, Forward) - isinstance(each, (Backward, BackwardWeight))
        most = max(most, alive)
    return most


def bubble(spans: Sequence[Span]) -> float:
    """Share of the time of all stages in which they do nothing."""
    stages = 1 + max(span.stage for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (stages * max(span.end for span in spans))

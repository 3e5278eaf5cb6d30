"""What can be known of a schedule before it runs: that it ends, what it keeps in memory, when each thing happens."""

from collections.abc import Sequence
from dataclasses import dataclass

from .schedule import Backward, Forward, Instruction, RecvActivation, RecvGrad, SendActivation, SendGrad

Plan = Sequence[Sequence[Instruction]]  # the instructions of every stage
SENT_BY = {RecvActivation: (-1, SendActivation), RecvGrad: (1, SendGrad)}  # where a message comes from


class ScheduleError(ValueError):
    """A schedule that cannot work; the message names stage and instruction."""


@dataclass(frozen=True)
class Span:
    """One pass of one micro-batch over one stage."""

    stage: int
    micro: int
    backward: bool
    begin: float
    end: float


def check(plan: Plan, micros: int) -> None:
    """Raise ScheduleError unless every micro-batch goes once each way, messages match, and nobody waits for ever.

    Messages of a link arrive in the order they were sent, which is what gloo and NCCL promise,
    so receives must stand in that order, too.
    """
    last = len(plan) - 1
    trains = any(isinstance(i, Backward) for stage in plan for i in stage)
    for stage, instructions in enumerate(plan):
        for compute in (Forward, Backward) if trains else (Forward,):
            done = sorted(i.micro for i in instructions if type(i) is compute)
            if done != list(range(micros)):
                raise ScheduleError(f"stage {stage}: {compute.__name__} runs for {done}, not once for each of {micros}")
        for kind, (hop, sender) in SENT_BY.items():
            received = [i.micro for i in instructions if type(i) is kind]
            inside = 0 <= stage + hop <= last
            sent = [i.micro for i in plan[stage + hop] if type(i) is sender] if inside else []
            if received != sent:
                raise ScheduleError(
                    f"stage {stage} receives {kind.__name__} of {received}, stage {stage + hop} sends {sent}"
                )
    times(plan)


def times(plan: Plan, forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> list[Span]:
    """When each pass runs, if sends never block. Raises ScheduleError for a circle of stages that wait."""
    todo = [list(reversed(stage)) for stage in plan]
    clock = [0.0] * len(plan)
    arrival: dict[tuple[int, type, int], float] = {}
    spans: list[Span] = []
    while any(todo):
        moved = False
        for stage, rest in enumerate(todo):
            while rest:
                head = rest[-1]
                if type(head) in SENT_BY:
                    hop, sender = SENT_BY[type(head)]
                    if (stage + hop, sender, head.micro) not in arrival:
                        break
                    clock[stage] = max(clock[stage], arrival[stage + hop, sender, head.micro])
                elif isinstance(head, (Forward, Backward)):
                    begin = clock[stage]
                    clock[stage] += backward if isinstance(head, Backward) else forward
                    spans.append(Span(stage, head.micro, isinstance(head, Backward), begin, clock[stage]))
                else:
                    arrival[stage, type(head), head.micro] = clock[stage] + message
                rest.pop()
                moved = True
        if not moved:
            waiting = ", ".join(f"stage {s} at {type(r[-1]).__name__}({r[-1].micro})" for s, r in enumerate(todo) if r)
            raise ScheduleError(f"the stages wait for each other for ever: {waiting}")
    return spans


def most_in_flight(instructions: Sequence[Instruction]) -> int:
    """The most micro-batches whose activations a stage keeps at once."""
    alive = most = 0
    for each in instructions:
        alive += isinstance(each, Forward) - isinstance(each, Backward)
        most = max(most, alive)
    return most


def bubble(spans: Sequence[Span]) -> float:
    """Share of the time of all stages in which they do nothing."""
    stages = 1 + max(span.stage for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (stages * max(span.end for span in spans))

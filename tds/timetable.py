"""Analysis of a schedule before it runs: termination, memory, and the time of each pass."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from .deadlocks import Rules, refuse_deadlocks
from .schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Kind,
    Plan,
    RecvActivation,
    RecvGrad,
    ScheduleError,
    SendActivation,
    SendGrad,
    num_chunks,
    with_messages,
)

# For each receive, the distance in virtual stages to the sender, and the sender's instruction.
SENDER_OF = {RecvActivation: (-1, SendActivation), RecvGrad: (1, SendGrad)}
PASSES = {Forward: "F", Backward: "B", BackwardInput: "B", BackwardWeight: "W"}
PassSeconds = Callable[[Kind, int, int], float]  # (kind, stage, chunk) -> seconds of one pass
# (instruction, an instruction that must come before it if the plan needs that one)
DEPENDENCIES = (
    (Forward, RecvActivation), (SendActivation, Forward), (Backward, Forward), (Backward, RecvGrad),
    (BackwardInput, Forward), (BackwardInput, RecvGrad), (BackwardWeight, BackwardInput), (SendGrad, Backward),
    (SendGrad, BackwardInput),
)  # fmt: skip
Pairs = Sequence[tuple[Kind, Kind]]


class Span(NamedTuple):
    """One pass of one micro-batch over one chunk of a stage. kind: F, B or W."""

    stage: int
    micro: int
    chunk: int
    kind: str
    begin: float
    end: float


def check_plan(plan: Plan, micros: int, rules: Rules | None = None) -> None:
    """Raise ScheduleError unless each chunk runs every micro-batch's passes once, messages match and no stage hangs.

    Each chunk must take the micro-batches in rising order. `simulate_times` finds deadlocks that do not depend on the
    transport. `deadlocks.refuse_deadlocks` finds deadlocks that message queues cause, under `rules`.
    """
    stages = len(plan)
    chunks = num_chunks(plan)
    passes: tuple[Kind, ...] = (Forward, *_backward_kinds(plan))
    for stage, instructions in enumerate(plan):
        for chunk in range(chunks):
            # A chunk must run for each micro-batch: the passes, and the messages that `with_messages` adds to them.
            order = [kind(0, chunk) for kind in passes]
            expected_kinds = list(map(type, with_messages(order, stage, stages, chunks)))
            _check_counts(instructions, expected_kinds, micros, stage, chunk)
    simulate_times(plan)
    if stages > 1:  # a single stage sends no messages
        refuse_deadlocks(plan, rules or Rules())


def _backward_kinds(plan: Plan) -> tuple[Kind, ...]:
    """Return the kinds of backward passes in a plan. Raises ScheduleError if whole and split passes are mixed."""
    split = (BackwardInput, BackwardWeight)
    kinds = set(map(type, chain.from_iterable(plan)))
    if kinds.isdisjoint(split):
        return (Backward,) if Backward in kinds else ()
    if Backward in kinds:
        raise ScheduleError(
            "the schedule has both Backward and BackwardInput or BackwardWeight instructions: let all stages use "
            "either Backward, or BackwardInput with BackwardWeight, for all micro-batches"
        )
    return split


def _check_counts(
    instructions: Sequence[Instruction], expected_kinds: Sequence[Kind], micros: int, stage: int, chunk: int
) -> None:
    """Raise ScheduleError unless a chunk has each kind in `expected_kinds` once for every micro-batch."""
    # A chunk need not have both kinds: the first stage receives no activation before its forward pass.
    dependencies = [pair for pair in DEPENDENCIES if set(expected_kinds).issuperset(pair)]
    done = _count_in_order(instructions, stage, chunk, dependencies)
    kinds: list[Kind] = [*PASSES, *expected_kinds, *done]  # in a fixed order, so that all ranks report the same error
    for kind in kinds:
        expected = micros if kind in expected_kinds else 0
        if done[kind] != expected:
            raise ScheduleError(
                f"stage {stage}: chunk {chunk} has {done[kind]} {kind.__name__} instructions instead of {expected}"
            )


def _count_in_order(instructions: Sequence[Instruction], stage: int, chunk: int, dependencies: Pairs) -> Counter[Kind]:
    """Return the number of instructions of each kind on a chunk.

    Raises ScheduleError unless each kind takes the micro-batches in rising order, and each instruction follows those
    that it depends on, e.g. a backward pass its forward pass.
    """
    done: Counter[Kind] = Counter()
    for each in instructions:
        if each.chunk != chunk:
            continue
        kind = type(each)
        # The next micro-batch of a kind is done[kind]. Micro-batch m of another kind is done if done[other] > m.
        needed = [earlier for later, earlier in dependencies if later is kind]
        if each.micro != done[kind] or any(done[earlier] <= each.micro for earlier in needed):
            raise ScheduleError(
                f"stage {stage}: {kind.__name__}({each.micro}) of chunk {chunk} is out of order: each kind of "
                f"instruction must take the micro-batches in rising order, after the instruction that it depends on"
            )
        done[kind] += 1
    return done


def simulate_times(
    plan: Plan,
    forward: float = 1.0,
    backward: float = 2.0,
    message: float = 0.0,
    weight: float | None = None,
    seconds: PassSeconds | None = None,
) -> list[Span]:
    """Return the time span of each pass if sends never block. Raises ScheduleError for a deadlock.

    Each stage in turn runs its instructions until it must wait for a message, again and again, until all have ended.
    forward, backward: time of a pass over a whole stage. weight: the part of `backward` for gradients of weights,
    by default half. message: time that a message takes. seconds: function that returns the time of each pass by stage
    and chunk; it replaces `forward`, `backward` and `weight`.
    """
    chunks = num_chunks(plan)
    stages = len(plan)
    weight = backward / 2 if weight is None else weight
    cost = {Forward: forward, Backward: backward, BackwardInput: backward - weight, BackwardWeight: weight}
    seconds = seconds or (lambda kind, stage, chunk: cost[kind] / chunks)
    pending = [deque(stage) for stage in plan]
    clock = [0.0] * stages
    in_transit: dict[tuple[int, type], deque[float]] = defaultdict(deque)  # arrival times, by virtual stage
    spans = []
    while any(pending):
        num_remaining = sum(map(len, pending))
        for stage, instructions in enumerate(pending):
            while instructions:
                instruction = instructions[0]
                kind = type(instruction)
                virtual_stage = instruction.chunk * stages + stage
                if kind in SENDER_OF:
                    hop, send_kind = SENDER_OF[kind]
                    arrivals = in_transit[virtual_stage + hop, send_kind]
                    if not arrivals:
                        break  # not sent yet: continue with the next stage
                    clock[stage] = max(clock[stage], arrivals.popleft())
                elif kind in PASSES:
                    begin = clock[stage]
                    end = begin + seconds(kind, stage, instruction.chunk)
                    spans.append(Span(stage, instruction.micro, instruction.chunk, PASSES[kind], begin, end))
                    clock[stage] = end
                else:
                    in_transit[virtual_stage, kind].append(clock[stage] + message)
                instructions.popleft()
        if num_remaining == sum(map(len, pending)):  # no stage has run an instruction
            waiting = []
            for stage, instructions in enumerate(pending):
                if instructions:
                    waiting.append(f"stage {stage} at {type(instructions[0]).__name__}({instructions[0].micro})")
            raise ScheduleError(f"the stages deadlock: {', '.join(waiting)}")
    return spans


def max_in_flight(instructions: Sequence[Instruction]) -> int:
    """Return the largest number of micro-batches whose activations a stage keeps at once, summed over its chunks."""
    in_flight = highest = 0
    for each in instructions:
        if isinstance(each, Forward):
            in_flight += 1
        elif isinstance(each, (Backward, BackwardWeight)):
            in_flight -= 1
        highest = max(highest, in_flight)
    return highest


def bubble_fraction(spans: Sequence[Span]) -> float:
    """Return the fraction (0 to 1) of all stages' time in which they are idle."""
    stages = 1 + max(span.stage for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (stages * max(span.end for span in spans))

"""When each receive is posted, so that a step ends even if a stage synchronizes its device at any point.

A device synchronization (memory is short, or CUDA loads a kernel) waits for all pending messages of a stage. A send
ends only after its receiver has posted the receive, and a receive ends only after its sender has sent. So a receive
that is posted too late blocks the sender, and a receive that is posted too early blocks the receiver.

The right times are found by a simulation in which each stage waits for all of its messages before each pass. A
receiver posts a receive when its message has been sent and the receiver is between two passes. In this simulation,
time only moves forward, so with these times no stage can wait for its own later work. deadlocks.py checks this.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Kind,
    MicroChunk,
    Plan,
    RecvActivation,
    RecvGrad,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGrad,
    make_plan,
    num_chunks,
)

# Cost of a pass over all layers of a stage, relative to the forward pass.
PASS_COST = {Forward: 1.0, Backward: 2.0, BackwardInput: 1.0, BackwardWeight: 1.0}
SENDS = SendActivation, SendGrad
RECEIVES = RecvActivation, RecvGrad
# For each kind of receive: message -> number of passes of the stage after which this receive is posted.
PostAfter = Mapping[Kind, Mapping[MicroChunk, int]]


def read_agenda(instructions: Sequence[Instruction]) -> dict[Kind, deque[MicroChunk]]:
    """Return the messages that a stage receives, by kind, in the order of sending."""
    agenda: dict[Kind, deque[MicroChunk]] = defaultdict(deque)
    for each in instructions:
        if isinstance(each, RECEIVES):
            agenda[type(each)].append(each.micro_chunk)
    return agenda


@dataclass
class _Stage:
    """State of a stage in the simulation.

    number: index of the stage in the plan.
    busy_until: time when the current pass ends; None between two passes.
    unanswered: number of messages that this stage has sent and whose receives are not posted yet.
    agenda: messages to receive, in the order of sending.
    sent: messages sent to this stage whose receives are not posted yet, with the stages that sent them.
    """

    number: int
    todo: deque[Instruction]
    agenda: dict[Kind, deque[MicroChunk]]
    busy_until: float | None = None
    passes: int = 0
    unanswered: int = 0
    sent: dict[Kind, dict[MicroChunk, "_Stage"]] = field(default_factory=lambda: defaultdict(dict))
    post_after: dict[Kind, dict[MicroChunk, int]] = field(default_factory=lambda: defaultdict(dict))


class _Simulation:
    """Simulation of all stages of a plan, which finds after how many passes of a stage each receive is posted."""

    def __init__(self, plan: Plan, dynamic: bool) -> None:
        self.chunks = num_chunks(plan)
        self.dynamic = dynamic
        self.now = 0.0
        self.stages = [_Stage(number, deque(each), read_agenda(each)) for number, each in enumerate(plan)]

    def run(self) -> None:
        """Run all stages to their ends. Raises ScheduleError if they deadlock."""
        stages = self.stages
        while True:
            # Run all stages until each one computes, waits or has ended. A stage may unblock another one.
            has_changed = True
            while has_changed:
                has_changed = False
                for stage in stages:
                    has_changed |= self._run_until_blocked(stage)
            # Advance the time to the end of the next pass.
            ends = [stage.busy_until for stage in stages if stage.busy_until is not None]
            if not ends:
                break
            self.now = min(ends)
            for stage in stages:
                if stage.busy_until == self.now:
                    stage.busy_until = None
                    stage.passes += 1

        for stage in stages:
            if stage.todo:
                head = stage.todo[0]
                raise ScheduleError(
                    f"stages that synchronize their devices would deadlock: stage {stage.number} at "
                    f"{type(head).__name__}({head.micro}) of chunk {head.chunk}"
                )

    def _run_until_blocked(self, stage: _Stage) -> bool:
        """Run a stage as far as possible; return whether anything changed."""
        if stage.busy_until is not None:
            return False
        changed = self._post(stage)
        while stage.busy_until is None and stage.todo and self._step(stage):
            changed = True
        return changed

    def _step(self, stage: _Stage) -> bool:
        """Run the next instruction of a stage; return False if the stage has to wait."""
        head = stage.todo[0]
        if isinstance(head, SENDS):
            self._send(stage, head)
        elif isinstance(head, RECEIVES):
            self._post(stage, reader=head)  # a message with a header is posted here, once it has been sent
            if head.micro_chunk not in stage.post_after[type(head)]:
                return False  # it has not been sent yet
        elif stage.unanswered:
            return False  # a pass begins only when the receivers of all sent messages have posted the receives
        else:  # a pass over one chunk
            stage.busy_until = self.now + PASS_COST[type(head)] / self.chunks
        stage.todo.popleft()
        return True

    def _send(self, stage: _Stage, send: Instruction) -> None:
        """Send a message of `stage`. The stage cannot compute until the receiver has posted the receive."""
        # An activation goes to the next virtual stage, a gradient to the previous one. Virtual stages count through
        # the stages, chunk by chunk: with 4 stages, virtual stage 6 is chunk 1 of stage 2.
        kind: Kind = RecvActivation
        hop = 1
        if isinstance(send, SendGrad):
            kind = RecvGrad
            hop = -1
        stages = self.stages
        chunk, receiver = divmod(send.chunk * len(stages) + stage.number + hop, len(stages))
        stages[receiver].sent[kind][MicroChunk(send.micro, chunk)] = stage
        stage.unanswered += 1

    def _post(self, stage: _Stage, reader: Instruction | None = None) -> bool:
        """Post the receives of all messages sent to a stage; return whether there are any.

        If a message has a header, its receive is posted only when instruction `reader` reads the message,
        because the header gives the size.
        """
        changed = False
        for kind, agenda in stage.agenda.items():
            while agenda and agenda[0] in stage.sent[kind]:
                micro_chunk = agenda[0]
                has_header = kind is RecvActivation and (self.dynamic or micro_chunk.micro == 0)
                is_read_now = reader == kind(*micro_chunk)
                if has_header and not is_read_now:
                    break  # the messages behind it wait, too: receives are posted in the order of sending
                agenda.popleft()
                stage.post_after[kind][micro_chunk] = stage.passes
                stage.sent[kind].pop(micro_chunk).unanswered -= 1
                changed = True
        return changed


def simulate_posting(plan: Plan, dynamic: bool = False) -> list[PostAfter]:
    """Return, for each stage, after how many of its passes each receive is posted.

    dynamic: each activation has a header; otherwise, only the first activation of each chunk has one.
    Raises ScheduleError if there are no such times.
    """
    simulation = _Simulation(plan, dynamic)
    simulation.run()
    return [stage.post_after for stage in simulation.stages]


@dataclass(frozen=True)
class StagePlan:
    """The instructions that one stage runs in a step.

    post_after: the stage's item of `simulate_posting`; empty if `Rules.ahead` decides when receives are posted.
    """

    instructions: Sequence[Instruction]
    post_after: PostAfter


def plan_of_stage(
    stage: int, stages: int, posts_at_passes: bool, dynamic: bool, schedule: Schedule, micros: int
) -> StagePlan:
    """Return one stage's plan of a step of `micros` micro-batches.

    posts_at_passes: whether receives are posted after the passes that `simulate_posting` names.
    dynamic: each activation has a header.
    """
    if not posts_at_passes:
        return StagePlan(list(schedule(stage, stages, micros)), {})
    plan = make_plan(schedule, stages, micros)
    return StagePlan(plan[stage], simulate_posting(plan, dynamic)[stage])

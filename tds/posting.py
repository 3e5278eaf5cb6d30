"""When each receive is posted, so that a step ends even if a stage synchronizes its device at any point.

A device synchronization (memory is short, or CUDA loads a kernel) waits for all pending messages of a stage. A send
ends only after its receiver has posted the receive, and a receive ends only after its sender has sent. So a receive
that is posted too late blocks the sender, and a receive that is posted too early blocks the receiver.

The right points are found by a simulation in which each stage waits for all of its messages before each pass. A
receiver posts a receive when its message has been sent and the receiver is between two passes. In this simulation,
time only moves forward, so with these points no stage can wait for its own later work. deadlocks.py checks this.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .schedule import (
    At,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Kind,
    Plan,
    RecvActivation,
    RecvGrad,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGrad,
    chunks_of,
)

# Cost of a pass over all layers of a stage, relative to the forward pass.
COST = {Forward: 1.0, Backward: 2.0, BackwardInput: 1.0, BackwardWeight: 1.0}
SENDS = SendActivation, SendGrad
RECEIVES = RecvActivation, RecvGrad
# For each kind of receive: message -> number of passes of the stage after which this receive is posted.
Points = Mapping[Kind, Mapping[At, int]]


@dataclass
class _Stage:
    """State of a stage in the simulation.

    busy_until: time when the current pass ends; None between two passes.
    unanswered: number of messages that this stage has sent and whose receives are not posted yet.
    agenda: messages to receive, in the order of sending.
    sent: messages sent to this stage whose receives are not posted yet, with the stages that sent them.
    """

    todo: deque[Instruction]
    busy_until: float | None = None
    passes: int = 0
    unanswered: int = 0
    agenda: dict[Kind, deque[At]] = field(default_factory=dict)
    sent: dict[Kind, dict[At, int]] = field(default_factory=lambda: defaultdict(dict))
    points: dict[Kind, dict[At, int]] = field(default_factory=lambda: defaultdict(dict))


class _Simulation:
    def __init__(self, plan: Plan, dynamic: bool) -> None:
        self.chunks = chunks_of(plan)
        self.dynamic = dynamic
        self.now = 0.0
        self.stages = [_Stage(deque(instructions)) for instructions in plan]
        for stage in self.stages:
            stage.agenda = {kind: deque(each.at for each in stage.todo if type(each) is kind) for kind in RECEIVES}

    def run(self) -> None:
        """Run all stages to their ends. Raises ScheduleError if they deadlock."""
        numbers = range(len(self.stages))
        while True:
            while any([self._advance(number) for number in numbers]):
                pass
            ends = [stage.busy_until for stage in self.stages if stage.busy_until is not None]
            if not ends:
                break
            self.now = min(ends)
            for stage in self.stages:
                if stage.busy_until == self.now:
                    stage.busy_until = None
                    stage.passes += 1
        for number, stage in enumerate(self.stages):
            if stage.todo:
                head = stage.todo[0]
                raise ScheduleError(
                    f"stages that synchronize their devices would deadlock: stage {number} at "
                    f"{type(head).__name__}({head.micro}) of chunk {head.chunk}"
                )

    def _advance(self, number: int) -> bool:
        """Run a stage as far as possible; return whether anything changed."""
        stage = self.stages[number]
        if stage.busy_until is not None:
            return False
        changed = self._post(stage)
        while stage.busy_until is None and stage.todo and self._step(number, stage):
            changed = True
        return changed

    def _step(self, number: int, stage: _Stage) -> bool:
        """Run the next instruction of a stage; return False if the stage has to wait."""
        head = stage.todo[0]
        if isinstance(head, SENDS):
            self._send(number, head)
        elif isinstance(head, RECEIVES):
            kind = type(head)
            if head.at not in stage.points[kind]:
                self._post(stage, head)
            if head.at not in stage.points[kind]:
                return False
        elif stage.unanswered:
            return False
        else:
            stage.busy_until = self.now + COST[type(head)] / self.chunks
        stage.todo.popleft()
        return True

    def _send(self, number: int, send: Instruction) -> None:
        down = isinstance(send, SendActivation)
        virtual_stage = send.chunk * len(self.stages) + number + (1 if down else -1)
        chunk, receiver = divmod(virtual_stage, len(self.stages))
        self.stages[receiver].sent[RecvActivation if down else RecvGrad][At(send.micro, chunk)] = number
        self.stages[number].unanswered += 1

    def _post(self, stage: _Stage, taken: Instruction | None = None) -> bool:
        """Post the receives of all messages sent to a stage; return whether there are any.

        If a message has a header, its receive is posted only when the instruction `taken` reads the message,
        because the header gives the size.
        """
        changed = False
        for kind, agenda in stage.agenda.items():
            while agenda and agenda[0] in stage.sent[kind]:
                at = agenda[0]
                has_header = kind is RecvActivation and (self.dynamic or at.micro == 0)
                if has_header and not (taken and type(taken) is kind and taken.at == at):
                    break
                agenda.popleft()
                stage.points[kind][at] = stage.passes
                self.stages[stage.sent[kind].pop(at)].unanswered -= 1
                changed = True
        return changed


def receive_points(plan: Plan, dynamic: bool = False) -> list[Points]:
    """Return, for each stage, after how many of its passes each receive is posted.

    dynamic: each activation has a header; otherwise, only the first activation of each chunk has one.
    Raises ScheduleError if there are no such points.
    """
    simulation = _Simulation(plan, dynamic)
    simulation.run()
    return [stage.points for stage in simulation.stages]


@dataclass(frozen=True)
class StagePlan:
    """The instructions that one stage runs in a step.

    points: the stage's item of `receive_points`; empty if the number `Rules.ahead` decides when receives are posted.
    """

    instructions: Sequence[Instruction]
    points: Points


class StagePlans:
    """The plans of one stage, by schedule and number of micro-batches.

    at_points: whether receives are posted after the passes that `receive_points` names. dynamic: each activation has a
    header.
    """

    def __init__(self, stage: int, stages: int, at_points: bool, dynamic: bool) -> None:
        self._stage = stage
        self._stages = stages
        self._at_points = at_points
        self._dynamic = dynamic
        self._plans: dict[tuple[Schedule, int], StagePlan] = {}

    def plan(self, schedule: Schedule, micros: int) -> StagePlan:
        """Return the plan of a step of `micros` micro-batches; repeated calls return the same object."""
        if (schedule, micros) not in self._plans:
            self._plans[schedule, micros] = self._make(schedule, micros)
        return self._plans[schedule, micros]

    def _make(self, schedule: Schedule, micros: int) -> StagePlan:
        if not self._at_points:
            return StagePlan(list(schedule(self._stage, self._stages, micros)), {})
        plan = [list(schedule(each, self._stages, micros)) for each in range(self._stages)]
        return StagePlan(plan[self._stage], receive_points(plan, self._dynamic)[self._stage])

"""Simulation of a training step: the engine's own schedules with costs, on shared links and cores.

This is a discrete-event simulation. Everything in a step is a task that starts after other tasks have ended.
Passes and optimizer steps take a rank's share of the cores; messages take turns on a link. queues.py gives the
order in which a rank submits its operations, as in the proof that a step ends. So receives that are posted in
advance, and NCCL's queue for each communicator, are modelled too.
"""

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from tds.queues import Graph, Rules, StageGraph
from tds.schedule import At, Backward, BackwardWeight, Forward, Instruction, Plan, ScheduleError
from tds.timetable import PASSES, Span, bubble

Cost = float | Callable[[int, int], float]  # seconds, or a function of (stage, chunk)


@dataclass(frozen=True)
class Costs:
    """Costs in seconds for a rank with all its cores to itself.

    forward, backward: of a pass over one chunk.
    weight: the part of `backward` that zb-h1 defers, by default half.
    halves: overhead of splitting a backward pass.
    message: bytes of an activation that leaves a chunk; its gradient has the same size.
    hands: time that the sender and the receiver each spend on a message.
    begin, reduce, optimizer: before the first pass, over replicas after the last one, and at the end of a step.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    weight: Cost | None = None
    halves: float = 0.0
    message: Cost = 0.0
    hands: float = 0.0
    begin: Cost = 0.0
    reduce: Cost = 0.0
    optimizer: Cost = 0.0

    def of(self, kind: type[Instruction], stage: int, chunk: int) -> float:
        """Return the seconds of one pass of this kind on `stage`."""
        if kind is Forward:
            return at(self.forward, stage, chunk)
        whole = at(self.backward, stage, chunk)
        if kind is Backward:
            return whole
        weight = whole / 2 if self.weight is None else at(self.weight, stage, chunk)
        return (weight if kind is BackwardWeight else whole - weight) + self.halves / 2


def at(cost: Cost, stage: int, chunk: int = 0) -> float:
    """Return a cost on one chunk of a stage."""
    return cost(stage, chunk) if callable(cost) else cost


def by_itself(border: int, stages: int, to_the_right: bool) -> Hashable:
    """Return a separate link for each direction of each stage boundary."""
    return border, to_the_right


@dataclass(frozen=True)
class Machine:
    """The hardware that the ranks share.

    latency, bandwidth: seconds and bytes per second of a link; messages on one link take turns.
    link: key of a message's link, from its boundary, the number of stages and whether it goes to the right. The
        replica is added to the key.
    rates: speed of each of n ranks that compute at once on one host, by n, relative to a lone rank; empty: ranks
        do not share cores.
    ranks_per_host: neighbours, replica after replica; None: all ranks are on one host.
    rules: how messages move; None: as on gloo with unlimited receives posted in advance.
    slow: by stage, a factor on its times.
    jitter: 0.1 draws a factor from 0.9 to 1.1 for each pass, by `seed`.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    link: Callable[[int, int, bool], Hashable] = by_itself
    rates: Sequence[float] = ()
    ranks_per_host: int | None = None
    rules: Rules | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def rate(self, busy: int) -> float:
        """Return the relative speed of each of `busy` ranks on one host; beyond `rates`, they share the last total."""
        if not self.rates:
            return 1.0
        known = len(self.rates)
        return self.rates[busy - 1] if busy <= known else self.rates[-1] * known / busy


class Message(NamedTuple):
    """A message that crossed a stage boundary; stage, micro, chunk are those of the sender.

    asked, begin, end: times when it was posted, started on its link, and arrived.
    """

    stage: int
    to: int
    micro: int
    chunk: int
    forward: bool
    asked: float
    begin: float
    end: float


@dataclass(frozen=True)
class Result:
    """The last simulated step of the first replica, with times from its start.

    seconds: duration of the step.
    idle: by stage, seconds without computation by reason: `first input` (before its first pass), `input` and
        `gradient` (not yet computed by another stage), `message` (in transit), `end` (after its last pass).
    """

    seconds: float
    spans: list[Span]
    messages: list[Message]
    idle: list[dict[str, float]]

    @property
    def bubble(self) -> float:
        """Idle share of all stages' time between the first and the last pass, measured as in timelines."""
        zero = min(span.begin for span in self.spans)
        return bubble([Span(s.stage, s.micro, s.chunk, s.kind, s.begin - zero, s.end - zero) for s in self.spans])


class _Task(NamedTuple):
    """Work of an event that takes time: computation on a host, or a message on a link."""

    work: float
    host: int | None = None
    link: Hashable = None


class _Stage(StageGraph):
    """A stage of one replica in one step, whose events have costs."""

    def __init__(
        self, graph: "_Work", costs: Costs, machine: Machine, rank: tuple[int, int], host: int, size: tuple[int, int]
    ) -> None:
        super().__init__(graph, machine.rules or FREE, rank[1], *size)
        self.work, self.costs, self.machine, self.host = graph, costs, machine, host
        self._waited: int | None = None
        # Each item is a pass, its end, and the arrival that it waited for.
        self.passes: list[tuple[Instruction, int, int | None]] = []

    def spend(self, name: str, seconds: float, *after: int | None) -> int:
        """Add computation after all earlier computation of this stage."""
        self._computed = self.work.task(name, _Task(seconds, self.host), self._computed, *after)
        return self._computed

    def _compute(self, each: Instruction) -> None:
        draw = 1 + self.machine.jitter * self.work.dice.uniform(-1, 1) if self.machine.jitter else 1.0
        slow = self.machine.slow.get(self.stage, 1.0)
        seconds = self.costs.of(type(each), self.stage, each.chunk) * slow * draw
        self.passes.append(
            (each, self.spend(f"{type(each).__name__}({each.micro}) of stage {self.stage}", seconds), self._waited)
        )
        self._waited = None

    def _take(self, kind: type[Instruction]) -> None:
        super()._take(kind)
        self._waited = self.taken
        if self.costs.hands:
            self.spend("a message taken", self.costs.hands)

    def _message(self, kind: type[Instruction], at: At, what: str = "") -> int:
        if not what and self.costs.hands and kind.__name__.startswith("Send"):
            self.spend("a message given", self.costs.hands)
        return super()._message(kind, at, what)

    @property
    def last(self) -> int | None:
        """The event that ends all computation so far, or None."""
        return self._computed

    def goes_on_after(self, *moments: int) -> None:
        """Let this stage continue only after these events."""
        self._computed = self.work.moment(f"stage {self.stage} goes on", 0.0, *moments, self._computed)


FREE = Rules(ahead=10**9, queue=lambda border, stages, right: None, message=0.0)  # no queues; links order the messages


class _Work(Graph):
    """The graph of all events, and its simulation."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.dice = machine, random.Random(machine.seed)
        self.tasks: dict[int, _Task] = {}
        # Arrival -> (event on its link, posting, stage, micro-batch and chunk, to the right).
        self.sent: dict[int, tuple[int, int, int, At, bool]] = {}
        self.begun, self.ended = dict[int, float](), list[float]()

    def task(self, name: str, task: _Task, *after: int | None) -> int:
        """Add an event that ends `task` and return it."""
        moment = self.moment(name, 0.0, *after)
        self.tasks[moment] = task
        return moment

    def run(self) -> None:
        """Simulate all events. Raises ScheduleError for a cycle."""
        clock = _Clock(self)
        clock.run()
        self.ended, self.begun = clock.ended, clock.begun
        if any(clock.left):
            raise ScheduleError(self._circle(clock.left))


class _Clock:
    """Simulated time; it advances to the next end of work, release of a link or arrival."""

    def __init__(self, graph: _Work) -> None:
        self.tasks, self.machine = graph.tasks, graph.machine
        self.left = [len(each) for each in graph.after]  # number of events that each event still waits for
        self.then: list[list[int]] = [[] for _ in graph.after]
        for this, before in enumerate(graph.after):
            for each in before:
                self.then[each].append(this)
        self.now, self.begun, self.ended = 0.0, dict[int, float](), [0.0] * len(self.left)
        self.ready = deque(i for i, n in enumerate(self.left) if not n)
        self._hosts: defaultdict[Hashable, dict[int, float]] = defaultdict(dict)  # remaining work by event
        # Messages of each link; the first one is in transit.
        self._lines: defaultdict[Hashable, deque[int]] = defaultdict(deque)
        self._events: list[tuple[float, int, int, bool]] = []  # (time, order, event, whether it only leaves its link)
        self._order = count()

    def run(self) -> None:
        """Run until no event is left."""
        while True:
            while self.ready:
                self._begin(self.ready.popleft())
            done = (min(w.values()) / self.machine.rate(len(w)) for w in self._hosts.values() if w)
            soonest = min(done, default=float("inf"))
            until = min(self.now + soonest, self._events[0][0] if self._events else float("inf"))
            if until == float("inf"):
                return
            self._compute(until)
            while self._events and self._events[0][0] <= self.now:
                self._move(*heapq.heappop(self._events)[2:])

    def _begin(self, moment: int) -> None:
        task = self.tasks.get(moment)
        if task is None:
            self._end(moment)
        elif task.host is not None:
            self.begun[moment] = self.now
            self._hosts[task.host][moment] = task.work
        else:
            self._lines[task.link].append(moment)
            if len(self._lines[task.link]) == 1:
                self._depart(moment)

    def _end(self, moment: int) -> None:
        self.ended[moment] = self.now
        for each in self.then[moment]:
            self.left[each] -= 1
            if not self.left[each]:
                self.ready.append(each)

    def _compute(self, until: float) -> None:
        """Advance to `until` with processor sharing: all ranks that compute on a host have the same speed."""
        passed, self.now = until - self.now, until
        for work in self._hosts.values():
            step = passed * self.machine.rate(len(work)) if work else 0.0
            for moment in list(work):
                work[moment] -= step
                if work[moment] <= 1e-12:
                    del work[moment]
                    self._end(moment)

    def _depart(self, moment: int) -> None:
        self.begun[moment] = self.now
        heapq.heappush(self._events, (self.now + self.tasks[moment].work, next(self._order), moment, True))

    def _move(self, moment: int, leaves: bool) -> None:
        """Release a message's link to the next message, and let the message arrive after the latency."""
        if not leaves:
            self._end(moment)
            return
        line = self._lines[self.tasks[moment].link]
        line.popleft()
        heapq.heappush(self._events, (self.now + self.machine.latency, next(self._order), moment, False))
        if line:
            self._depart(line[0])


def simulate(
    plan: Plan, costs: Costs | None = None, machine: Machine | None = None, replicas: int = 1, steps: int = 2
) -> Result:
    """Simulate `steps` consecutive steps of `plan` and return the last. Raises ScheduleError for a deadlock."""
    costs, machine = costs or Costs(), machine or Machine()
    graph, size = _Work(machine), (len(plan), 1 + max((i.chunk for stage in plan for i in stage), default=0))
    before: dict[tuple[int, int], int] = {}
    made: dict[tuple[int, int], _Stage] = {}
    agreed = begun = -1
    for _ in range(steps):
        begun, made = agreed, {}
        for rank in [(replica, stage) for replica in range(replicas) for stage in range(len(plan))]:
            host = (rank[0] * len(plan) + rank[1]) // (machine.ranks_per_host or 10**9)
            made[rank] = _Stage(graph, costs, machine, rank, host, size)
            if rank in before:
                made[rank].goes_on_after(before[rank])
            if begin := at(costs.begin, rank[1]):
                made[rank].spend("beginning", begin)
            made[rank].run(plan[rank[1]])
        for replica in range(replicas):
            _join(graph, costs, [made[replica, stage] for stage in range(len(plan))], replica)
        agreed = _end_of_step(graph, costs, made, before)
    graph.run()
    return _result(graph, plan, made, begun, agreed)


def _end_of_step(
    graph: _Work, costs: Costs, made: Mapping[tuple[int, int], _Stage], before: dict[tuple[int, int], int]
) -> int:
    """Add the gradient reduction, the agreement on loss and norm, and the optimizer step.

    Returns the event of the agreement.
    """
    lasts: defaultdict[int, list[int]] = defaultdict(list)
    for (_, number), stage in made.items():
        lasts[number] += [stage.last] if stage.last is not None else []
    for (_, number), stage in made.items():
        stage.goes_on_after(*lasts[number])
        stage.spend("reducing", at(costs.reduce, number))
    agreed = graph.moment("the ranks agree on the loss", 0.0, *(stage.last for stage in made.values()))
    for rank, stage in made.items():
        stage.goes_on_after(agreed)
        before[rank] = stage.spend("optimizer", at(costs.optimizer, rank[1]))
    return agreed


def _join(graph: _Work, costs: Costs, stages: Sequence[_Stage], replica: int) -> None:
    """Add a transfer between the two ends of each message."""
    machine, size = graph.machine, len(stages)
    sends = {key[:-1]: (stage, moments) for stage in stages for key, moments in stage.ends.items() if key[-1]}
    for taker in stages:
        for (border, right, what, at_, is_send), (posted, arrived) in taker.ends.items():
            if is_send:
                continue
            giver, (sent, left) = sends[border, right, what, at_]
            # A message has the chunk number of the activation's sender; a gradient has the activation's size.
            size_of = 0.0 if what else at(costs.message, border, at_.chunk)
            task = _Task(size_of / machine.bandwidth, link=(replica, machine.link(border, size, right)))
            waits = [sent] if machine.rules is None else [sent, posted]
            name = f"a message over border {border}"
            moved = graph.moment(name, 0.0, *waits) if what else graph.task(name, task, *waits)
            graph.after[arrived].append(moved)
            if machine.rules is not None:
                graph.after[left].append(moved)
            if not what:
                graph.sent[arrived] = (moved, sent, giver.stage, at_, right)


def _result(graph: _Work, plan: Plan, made: Mapping[tuple[int, int], _Stage], begun: int, agreed: int) -> Result:
    when = graph.ended
    zero = when[begun] if begun >= 0 else 0.0
    spans, messages, idle = list[Span](), [], []
    for number in range(len(plan)):
        stage, reasons, free = made[0, number], defaultdict[str, float](float), zero
        for each, end, arrived in stage.passes:
            begin = graph.begun[end]
            way = 0.0
            if arrived is not None:
                moved, sent, giver, at_, right = graph.sent[arrived]
                on = graph.begun[moved]
                times = (when[sent] - zero, on - zero, when[arrived] - zero)
                messages.append(Message(giver, number, at_.micro, at_.chunk, right, *times))
                way = min(max(begin - free, 0.0), max(when[arrived] - when[sent], 0.0))
            word = "first input" if free == zero else "input" if type(each) is Forward else "gradient"
            reasons["message"] += way
            reasons[word] += max(begin - free, 0.0) - way
            spans.append(Span(number, each.micro, each.chunk, PASSES[type(each)], begin - zero, when[end] - zero))
            free = when[end]
        reasons["end"] += max(when[agreed] - free, 0.0)
        idle.append({word: seconds for word, seconds in reasons.items() if seconds > 1e-12})
    return Result(when[agreed] - zero, spans, messages, idle)

"""Proof that a schedule cannot deadlock under NCCL's ordering of each communicator, see queues.py.

With CUDA_DEVICE_MAX_CONNECTIONS=1, the device also starts all work, computation and messages alike, in the order of
submission.

This module models a step as a graph of operations, in which each operation waits for other operations. A message ends
only after both its send and its receive have started. If the graph has no cycle, the step ends.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from .posting import RECEIVES, SENDS, Points, receive_points
from .queues import POSTED_AHEAD, boundary_parity
from .schedule import (
    At,
    Instruction,
    Kind,
    Plan,
    RecvActivation,
    RecvGrad,
    ScheduleError,
    SendActivation,
    SendGrad,
)


def queue_of(boundary: int, stages: int, down: bool) -> Hashable:
    """Return a key of the process group that transports a message: its boundary's parity, and its direction.

    down: True for an activation to the next stage, False for a gradient to the previous stage.
    """
    return boundary_parity(boundary, stages), down


@dataclass(frozen=True)
class Rules:
    """The rules by which a device and its transport run computation and messages.

    ahead: number of receives that a channel posts in advance; None: posting.py computes when receives are posted.
    one_hardware_queue: the device starts all its work in the order of submission. A schedule that ends under this
        rule also ends if only some streams share a hardware queue.
    dynamic: each activation has a header, for which the receiving host waits. Otherwise only the first activation of
        each chunk has a header.
    queue: function (boundary, number of stages, whether the message goes to the next stage) -> key of the message's
        queue; None if the message does not wait for other messages.
    device_waits: the host synchronizes the device wherever it allocates memory or computes, as when memory is short
        or a kernel is loaded.
    """

    ahead: int | None = POSTED_AHEAD
    one_hardware_queue: bool = False
    dynamic: bool = False
    queue: Callable[[int, int, bool], Hashable | None] = queue_of
    device_waits: bool = False


class Graph:
    """A dependency graph of events; each happens after all events that it waits for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.after: list[list[int]] = []

    def add_event(self, name: str, *after: int | None) -> int:
        """Add an event and return its number. after: numbers of the events that it waits for; None is ignored."""
        self.names.append(name)
        self.after.append([each for each in after if each is not None])
        return len(self.names) - 1

    def refuse_cycle(self) -> None:
        """Raise ScheduleError, which names the cycle, if some events wait for each other."""
        followers = self._followers()
        left = [len(before) for before in self.after]  # for each event, how many events it still waits for
        ready = [event for event, count in enumerate(left) if not count]
        while ready:
            for each in followers[ready.pop()]:
                left[each] -= 1
                if not left[each]:
                    ready.append(each)
        if any(left):
            raise ScheduleError(self._cycle(left))

    def _followers(self) -> list[list[int]]:
        """Return, for each event, the events that wait for it."""
        followers: list[list[int]] = [[] for _ in self.after]
        for event, before in enumerate(self.after):
            for each in before:
                followers[each].append(event)
        return followers

    def _cycle(self, left: Sequence[int]) -> str:
        """Describe a cycle of the graph. left: for each event, how many events it still waits for."""
        path = list[int]()
        event = next(i for i, count in enumerate(left) if count)
        while event not in path:
            path.append(event)
            event = next(each for each in self.after[event] if left[each])
        names = []
        for each in path[path.index(event) :]:
            if self.names[each] not in names:
                names.append(self.names[each])
        if len(names) > 8:
            names[7:] = ["..."]
        return "messages would deadlock: " + ", which waits for ".join(names)


class StageGraph:
    """Builder of the graph of one stage: its operations, in the order in which the engine submits them."""

    def __init__(self, graph: Graph, rules: Rules, stage: int, stages: int, points: Points) -> None:
        self.graph = graph
        self.rules = rules
        self.stage = stage
        self.stages = stages
        self._points = points
        self._passes = 0
        # Keys: (link, True if this stage is the sender). `ends`: start event and end event of a message. `headers`:
        # event of a header.
        self.ends: dict[tuple[Any, bool], tuple[int, int]] = {}
        self.headers: dict[tuple[Any, bool], int] = {}
        # Each int below is the number of an event in the graph.
        self._last: dict[Hashable, int] = {}  # for each queue, the event at which its last message ends
        self._computed: int | None = None  # the event that the next computation must wait for
        self._host: int | None = None  # last event that the host has waited for
        self._last_start: int | None = None  # start of the operation submitted last
        self._since_sync: list[int] = []  # end events of the operations since the last device synchronization
        # For each kind of receive: _agenda has the receives that are not posted yet, _posted the posted receives, and
        # _known the messages whose layout is known.
        self._agenda: dict[Kind, deque[At]] = defaultdict(deque)
        self._posted: dict[Kind, deque[int]] = defaultdict(deque)
        self._known: dict[Kind, set[At]] = defaultdict(set)

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Submit all instructions."""
        for each in instructions:
            if isinstance(each, RECEIVES):
                self._agenda[type(each)].append(each.at)
        for each, following in zip_longest(instructions, instructions[1:]):
            kind = type(each)
            if kind is RecvActivation and self._has_header(each):
                self._receive_header(each)
            if kind in RECEIVES:
                self._take(kind)
            elif kind in SENDS:
                self._send(each)
            else:
                self._compute(each)
            if not isinstance(following, SENDS):
                self._post(RecvActivation)
                self._post(RecvGrad)

    def _receive_header(self, each: Instruction) -> None:
        """Let the host wait for a header, from which it knows the layout of the message, or of all of this chunk."""
        self._host = self._header(RecvActivation, each.at)
        if self.rules.dynamic:
            self._known[RecvActivation].add(each.at)
        else:
            agenda = self._agenda[RecvActivation]
            self._known[RecvActivation].update(at for at in agenda if at.chunk == each.chunk)

    def _has_header(self, each: Instruction) -> bool:
        return self.rules.dynamic or each.micro == 0

    def _compute(self, each: Instruction) -> None:
        name = f"{type(each).__name__}({each.micro}) of stage {self.stage}"
        self._synchronize(name)
        self._computed = self._submit(name, self._computed)[1]
        self._passes += 1

    def _send(self, each: Instruction) -> None:
        """Submit a send. Before it, the host allocates buffers for the message and for the gradient of its tensors."""
        kind = type(each)
        at = each.at
        self._synchronize(f"{kind.__name__}({each.micro}) of stage {self.stage}")
        if kind is SendActivation:
            self._known[RecvGrad].add(at)
            if self._has_header(each):
                self._header(kind, at)
        self._message(kind, at)

    def _synchronize(self, name: str) -> None:
        """Let the host wait for all operations submitted so far, if the rules say so. name: what comes next."""
        if self.rules.device_waits:
            name = f"the device of stage {self.stage} before {name}"
            self._host = self.graph.add_event(name, self._host, *self._since_sync)
            self._since_sync = []

    def _submit(self, name: str, *after: int | None) -> tuple[int, int]:
        """Submit an operation that waits for the last submitted computation; return its start and end events."""
        first = self._last_start if self.rules.one_hardware_queue else None
        start = self.graph.add_event(name, *after, self._computed, self._host, first)
        self._last_start = start
        end = self.graph.add_event(name, start)
        self._since_sync.append(end)
        return start, end

    def _header(self, kind: Kind, at: At) -> int:
        """Send or receive a header, which goes from host to host, so that only the receiving host waits."""
        event = self.graph.add_event(f"{kind.__name__}({at.micro}, header) of stage {self.stage}", self._host)
        self.headers[self._link(kind, at), kind is SendActivation] = event
        return event

    def _link(self, kind: Kind, at: At) -> tuple[int, bool, At]:
        """Return (boundary, whether the message goes to the next virtual stage, micro-batch and sender's chunk)."""
        boundary = (self.stage if kind in (SendActivation, RecvGrad) else self.stage - 1) % self.stages
        # The first stage's chunk c + 1 follows the last stage's chunk c; a message between them is numbered c.
        sender = at.chunk - 1 if self.stage == 0 and kind in (RecvActivation, SendGrad) else at.chunk
        return boundary, kind in (SendActivation, RecvActivation), At(at.micro, sender)

    def _message(self, kind: Kind, at: At) -> int:
        link = self._link(kind, at)
        queue = self.rules.queue(link[0], self.stages, link[1])
        name = f"{kind.__name__}({at.micro}) of stage {self.stage}"
        start, end = self._submit(name, None if queue is None else self._last.get(queue))
        self._last[queue] = end
        self.ends[link, kind in SENDS] = start, end
        return end

    def _take(self, kind: Kind) -> None:
        """Make the device, not the host, wait for the next message of this kind."""
        if not self._posted[kind]:
            self._synchronize(f"the buffer for {kind.__name__} of stage {self.stage}")
            self._post(kind, 1)
        if not self._posted[kind]:
            raise ScheduleError(f"stage {self.stage}: {kind.__name__} comes before the SendActivation that it answers")
        arrived = self._posted[kind].popleft()
        self._computed = self._submit(f"what stage {self.stage} computes after {kind.__name__}", arrived)[0]

    def _post(self, kind: Kind, messages: int = 0) -> None:
        """Post receives of known layout: all that are due, then others until `messages` receives are pending."""
        agenda = self._agenda[kind]
        posted = self._posted[kind]
        wanted = max(self.rules.ahead or 0, messages)
        while agenda and agenda[0] in self._known[kind]:
            if len(posted) >= wanted and not self._is_due(kind, agenda[0]):
                return
            posted.append(self._message(kind, agenda.popleft()))

    def _is_due(self, kind: Kind, at: At) -> bool:
        points = self._points.get(kind, {})
        return at in points and points[at] <= self._passes


def refuse_deadlocks(plan: Plan, rules: Rules | None = None) -> None:
    """Raise ScheduleError, which names the operations that wait for each other, if a plan deadlocks under `rules`."""
    rules = rules or Rules()
    graph = Graph()
    points: Sequence[Points] = [{}] * len(plan)
    if rules.ahead is None:
        points = receive_points(plan, rules.dynamic)
    ends = dict[tuple[Any, bool], tuple[int, int]]()
    headers = dict[tuple[Any, bool], int]()
    for number, instructions in enumerate(plan):
        stage = StageGraph(graph, rules, number, len(plan), points[number])
        stage.run(instructions)
        ends |= stage.ends
        headers |= stage.headers
    for link, sends in ends:
        if sends:
            sent, left = ends[link, True]
            posted, arrived = ends[link, False]
            graph.after[arrived].append(sent)
            graph.after[left].append(posted)
    for link, sends in headers:
        if sends:
            graph.after[headers[link, False]].append(headers[link, True])
    graph.refuse_cycle()

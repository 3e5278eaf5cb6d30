"""Proof that a schedule cannot deadlock under NCCL's ordering of each communicator, see queues.py.

With CUDA_DEVICE_MAX_CONNECTIONS=1, the device also starts all work, computation and messages alike, in the order of
submission.

This module models a step as a graph of operations, in which each operation waits for other operations. A message ends
only after both its send and its receive have started. If the graph has no cycle, the step ends.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import zip_longest
from typing import Any, NamedTuple

from .posting import RECEIVES, SENDS, PostAfter, read_agenda, simulate_posting
from .queues import POSTED_AHEAD, boundary_parity
from .schedule import (
    Instruction,
    Kind,
    MicroChunk,
    Plan,
    RecvActivation,
    RecvGrad,
    ScheduleError,
    SendActivation,
    SendGrad,
)

LinkEnd = tuple[Any, bool]  # (link, True for its sender)


def queue_of(boundary: int, stages: int, to_next: bool) -> Hashable:
    """Return a key of the process group that transports a message: its boundary's parity, and its direction.

    to_next: True for an activation to the next stage, False for a gradient to the previous stage.
    """
    return boundary_parity(boundary, stages), to_next


class Rules(NamedTuple):
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
        self.waits_for: list[list[int]] = []
        # Each int below is the number of an event.
        self.message_events: dict[LinkEnd, tuple[int, int]] = {}  # start and end of each message
        self.header_events: dict[LinkEnd, int] = {}

    def add_event(self, name: str, *waits_for: int | None) -> int:
        """Add an event and return its number. waits_for: numbers of the events that it waits for; None is ignored."""
        self.names.append(name)
        self.waits_for.append([each for each in waits_for if each is not None])
        return len(self.names) - 1

    def refuse_cycle(self) -> None:
        """Raise ScheduleError, which names the cycle, if some events wait for each other."""
        try:
            TopologicalSorter(dict(enumerate(self.waits_for))).prepare()
        except CycleError as error:
            # Each event of the cycle waits for the one before it. Start and end of an operation have one name.
            cycle: list[int] = error.args[1]
            names = list(dict.fromkeys(self.names[each] for each in reversed(cycle)))
            if len(names) > 8:
                names[7:] = ["..."]
            raise ScheduleError("messages would deadlock: " + ", which waits for ".join(names)) from None


@dataclass
class StageGraph:
    """Builder of the graph of one stage: its operations, in the order in which the engine submits them."""

    graph: Graph
    rules: Rules
    stage: int
    stages: int
    post_after: PostAfter

    def __post_init__(self) -> None:
        self._passes = 0
        # Each int below is the number of an event in the graph.
        self._last_in_queue: dict[Hashable, int] = {}  # for each queue, the event at which its last message ends
        self._computation: int | None = None  # the event that the next computation must wait for
        self._host: int | None = None  # last event that the host has waited for
        self._last_start: int | None = None  # start of the operation submitted last
        self._since_sync: list[int] = []  # end events of the operations since the last device synchronization
        # For each kind of receive: _agenda has the receives that are not posted yet, _posted the posted receives, and
        # _known the messages whose layout is known.
        self._posted: dict[Kind, deque[int]] = defaultdict(deque)
        self._known: dict[Kind, set[MicroChunk]] = defaultdict(set)

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Submit all instructions, and post receives in advance between them."""
        # A receive may be posted long before its instruction, so list all receives first.
        self._agenda = read_agenda(instructions)
        for each, next_instruction in zip_longest(instructions, instructions[1:]):  # after the last one comes None
            kind = type(each)
            if kind is RecvActivation and self._has_header(each):
                self._receive_header(each)
            if kind in RECEIVES:
                self._receive(kind)
            elif kind in SENDS:
                self._send(each)
            else:
                self._compute(each)
            # Like the engine, submit the sends that follow before posting further receives.
            if not isinstance(next_instruction, SENDS):
                self._post(RecvActivation)
                self._post(RecvGrad)

    def _receive_header(self, each: Instruction) -> None:
        """Let the host wait for a header, from which it knows the layout of the message, or of all of this chunk."""
        self._host = self._add_header(RecvActivation, each.micro_chunk)
        known = self._known[RecvActivation]
        if self.rules.dynamic:
            known.add(each.micro_chunk)
        else:
            agenda = self._agenda[RecvActivation]
            known.update(micro_chunk for micro_chunk in agenda if micro_chunk.chunk == each.chunk)

    def _has_header(self, each: Instruction) -> bool:
        """Return whether the message of an instruction comes with a header, see `Rules.dynamic`."""
        return self.rules.dynamic or each.micro == 0

    def _compute(self, each: Instruction) -> None:
        """Submit a pass, which waits for the computation before it."""
        name = f"{type(each).__name__}({each.micro}) of stage {self.stage}"
        self._synchronize(name)
        self._computation = self._submit(name, self._computation)[1]  # the end of this pass
        self._passes += 1

    def _send(self, each: Instruction) -> None:
        """Submit a send. Before it, the host allocates buffers for the message and for the gradient of its tensors."""
        kind = type(each)
        micro_chunk = each.micro_chunk
        self._synchronize(f"{kind.__name__}({each.micro}) of stage {self.stage}")
        if kind is SendActivation:
            self._known[RecvGrad].add(micro_chunk)
            if self._has_header(each):
                self._add_header(kind, micro_chunk)
        self._add_message(kind, micro_chunk)

    def _synchronize(self, name: str) -> None:
        """Let the host wait for all operations submitted so far, if the rules say so. name: what comes next."""
        if self.rules.device_waits:
            name = f"the device of stage {self.stage} before {name}"
            self._host = self.graph.add_event(name, self._host, *self._since_sync)
            self._since_sync = []

    def _submit(self, name: str, *waits_for: int | None) -> tuple[int, int]:
        """Submit an operation that waits for the last submitted computation; return its start and end events."""
        previous_start = self._last_start if self.rules.one_hardware_queue else None
        start = self.graph.add_event(name, *waits_for, self._computation, self._host, previous_start)
        self._last_start = start
        end = self.graph.add_event(name, start)
        self._since_sync.append(end)
        return start, end

    def _add_header(self, kind: Kind, micro_chunk: MicroChunk) -> int:
        """Send or receive a header, which goes from host to host, so that only the receiving host waits."""
        event = self.graph.add_event(f"{kind.__name__}({micro_chunk.micro}, header) of stage {self.stage}", self._host)
        self.graph.header_events[self._link(kind, micro_chunk), kind is SendActivation] = event
        return event

    def _link(self, kind: Kind, micro_chunk: MicroChunk) -> tuple[int, bool, MicroChunk]:
        """Return (boundary, whether the message goes to the next virtual stage, micro-batch and sender's chunk)."""
        # Messages with the next stage cross boundary `stage`, those with the previous stage boundary `stage - 1`.
        boundary = self.stage
        chunk = micro_chunk.chunk
        if kind in (RecvActivation, SendGrad):
            boundary = (self.stage - 1) % self.stages
            # The first stage's chunk c + 1 follows the last stage's chunk c; a message between them is numbered c.
            if self.stage == 0:
                chunk -= 1
        return boundary, kind in (SendActivation, RecvActivation), MicroChunk(micro_chunk.micro, chunk)

    def _add_message(self, kind: Kind, micro_chunk: MicroChunk) -> int:
        """Submit a send or a receive, which waits for earlier messages in its queue, and return its end event."""
        link = self._link(kind, micro_chunk)
        boundary, to_next, _ = link
        queue = self.rules.queue(boundary, self.stages, to_next)
        name = f"{kind.__name__}({micro_chunk.micro}) of stage {self.stage}"
        start, end = self._submit(name, self._last_in_queue.get(queue))
        if queue is not None:  # else the message does not wait for others
            self._last_in_queue[queue] = end
        self.graph.message_events[link, kind in SENDS] = start, end
        return end

    def _receive(self, kind: Kind) -> None:
        """Make the device, not the host, wait for the next message of this kind.

        The receive is posted here unless `_post` has posted it before.
        """
        posted = self._posted[kind]
        if not posted:
            self._synchronize(f"the buffer for {kind.__name__} of stage {self.stage}")
            self._post(kind, min_pending=1)
            if not posted:  # its layout is unknown: a gradient has the layout of the activation that was sent
                raise ScheduleError(
                    f"stage {self.stage}: {kind.__name__} comes before the SendActivation that it answers"
                )
        # The compute stream waits for the message by an operation of its own, which can start when the message has
        # ended. Later computation waits for this start.
        message_end = posted.popleft()
        wait_start, _ = self._submit(f"what stage {self.stage} computes after {kind.__name__}", message_end)
        self._computation = wait_start

    def _post(self, kind: Kind, min_pending: int = 0) -> None:
        """Post receives of known layout, in order: all that are due, then others until enough are pending.

        `min_pending` and `Rules.ahead` say how many are enough. If `ahead` is None, only receives that are due are
        posted in advance.
        """
        agenda = self._agenda[kind]
        posted = self._posted[kind]
        wanted_pending = max(self.rules.ahead or 0, min_pending)
        while agenda and agenda[0] in self._known[kind]:
            if len(posted) >= wanted_pending and not self._is_due(kind, agenda[0]):
                return
            posted.append(self._add_message(kind, agenda.popleft()))

    def _is_due(self, kind: Kind, micro_chunk: MicroChunk) -> bool:
        """Return whether the schedule posts this receive now, after the passes so far."""
        post_after = self.post_after.get(kind, {})
        return micro_chunk in post_after and post_after[micro_chunk] <= self._passes


def refuse_deadlocks(plan: Plan, rules: Rules) -> None:
    """Raise ScheduleError, which names the operations that wait for each other, if a plan deadlocks under `rules`."""
    # Each stage adds its own operations to the graph, in the order in which it submits them.
    graph = Graph()
    # Number of passes after which a stage posts each receive. A channel that always posts `ahead` receives needs none.
    post_after: Sequence[PostAfter] = [{}] * len(plan)
    if rules.ahead is None:
        post_after = simulate_posting(plan, rules.dynamic)
    for number, instructions in enumerate(plan):
        StageGraph(graph, rules, number, len(plan), post_after[number]).run(instructions)

    # Messages connect the stages. A message ends only after both its send and its receive have started, so the end on
    # each side waits for the start on the other side. An end waits for the start on its own side anyway.
    for (link, is_sender), (_, end) in graph.message_events.items():  # each link twice, for its sender and its receiver
        other_start, _ = graph.message_events[link, not is_sender]
        graph.waits_for[end].append(other_start)
    # The receiving host waits for a header until it has been sent.
    for link, is_sender in graph.header_events:
        if is_sender:
            receive = graph.header_events[link, False]
            graph.waits_for[receive].append(graph.header_events[link, True])
    graph.refuse_cycle()

"""Simulation of recorded calls on NCCL: find calls that never end, and collectives that do not fit each other.

gloo's sends end when the data is in a buffer, so gloo accepts orders of calls that deadlock on NCCL. There, a send ends
when the peer receives, and the calls of a rank in one group run one after another; only the operations of a batch run
at the same time. A call starts after the end of all calls for which the rank's stream has waited.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """A call that has started on a rank, but not ended.

    operations: [name, peer or None, signature] for each operation that has not ended.
    """

    rank: int
    number: int
    group: str
    ranks: list[int]
    operations: list[list[Any]]
    place: str

    def __str__(self) -> str:
        names = ", ".join(name if peer is None else f"{name} (rank {peer})" for name, peer, _ in self.operations)
        return f"rank {self.rank}: {names} at {self.place}"


@dataclass
class Rank:
    """A rank in the simulation: its events, the number of those that are done, and its queues of calls by group."""

    number: int
    events: Sequence[Sequence[Any]]
    done: int = 0
    queues: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    ended: set[int] = field(default_factory=set)

    def advance(self) -> bool:
        """Start calls up to the first wait for one that has not ended; return whether any event is done."""
        before = self.done
        while self.done < len(self.events):
            kind, number, *details = self.events[self.done]
            if kind == "wait" and number not in self.ended:
                break
            if kind == "call":
                group, ranks, operations, place = details
                self.queues[group].append(Call(self.number, number, group, ranks, list(operations), place))
            self.done += 1
        return self.done > before

    def head(self, group: str) -> Call | None:
        """Return the call that runs in this group."""
        queue = self.queues.get(group)
        return queue[0] if queue else None

    def end_if_complete(self, call: Call) -> None:
        """End the running call of a group if all its operations have ended."""
        if not call.operations:
            self.ended.add(call.number)
            self.queues[call.group].pop(0)


class Mismatch(Exception):
    """Raised for calls that meet each other but do not fit."""


def find_deadlock(events_of_ranks: Sequence[Sequence[Sequence[Any]]]) -> list[str]:
    """Return sentences about calls that do not fit or never end; empty if all calls of all ranks end.

    events_of_ranks: for each rank, `Record.events`.
    """
    ranks = [Rank(number, events) for number, events in enumerate(events_of_ranks)]
    try:
        moved = True
        while moved:
            moved = any([rank.advance() for rank in ranks])
            groups = {group for rank in ranks for group, queue in rank.queues.items() if queue}
            moved = any([_run_group(ranks, group) for group in sorted(groups)]) or moved
    except Mismatch as error:
        return [str(error)]
    waiting = [call for rank in ranks for call in map(rank.head, rank.queues) if call is not None]
    return [f"never ends on NCCL: {call}" for call in waiting]


def _run_group(ranks: Sequence[Rank], group: str) -> bool:
    """End what can end in a group; return whether anything has."""
    heads = [(rank, call) for rank in ranks if (call := rank.head(group)) is not None]
    collectives = [(rank, call) for rank, call in heads if call.operations[0][1] is None]
    if collectives and _run_collective(collectives):
        return True
    return any([_run_messages(ranks, rank, call) for rank, call in heads])


def _run_collective(heads: Sequence[tuple[Rank, Call]]) -> bool:
    """End a collective that all ranks of its group have reached."""
    first = heads[0][1]
    if len(heads) < len(first.ranks):
        return False
    for _, call in heads[1:]:
        if call.operations[0] != first.operations[0]:
            raise Mismatch(f"{first} {first.operations[0][2]} meets {call} {call.operations[0][2]}")
    for rank, call in heads:
        call.operations.clear()
        rank.end_if_complete(call)
    return True


def _run_messages(ranks: Sequence[Rank], rank: Rank, call: Call) -> bool:
    """End the sends of a running call whose peers receive; return whether there are any."""
    moved = False
    for send in [each for each in call.operations if each[0] == "send"]:
        peer = ranks[send[1]]
        other = peer.head(call.group)
        receives = [each for each in (other.operations if other else []) if each[:2] == ["recv", rank.number]]
        if other is None or not receives:
            continue
        if receives[0][2] != send[2]:
            raise Mismatch(f"{call} {send[2]} meets {other} {receives[0][2]}")
        call.operations.remove(send)
        other.operations.remove(receives[0])
        peer.end_if_complete(other)
        moved = True
    if moved:
        rank.end_if_complete(call)
    return moved

"""Exchange of a fault through torch's store, and of each rank's report about it.

One process hosts the store: rank 0, or the launcher of the first node. So in a large run, a rank asks it less often.
"""

import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ._torch import default_store
from .messages import say
from .parent_death import spans_hosts

POLL_SECONDS = 0.25  # length of a tick
RANKS_PER_TICK = 200  # how many ranks may query the store in one tick; more ranks take turns
COLLECT_SECONDS = 3.0  # how long rank 0 waits for the reports of the other ranks, after all ranks have seen the fault
FAULT_KEY, PRINTED_KEY = "tds/fault", "tds/printed"
HOST_KEY = "tds/host/"  # + rank: the name of its host
_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (reset|closed|refused)[\w ]*|[Bb]roken pipe|remote process exited[\w ]*|ncclRemoteError"
)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 3, 4, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def name_this_rank(rank: int) -> str:
    """Return the name of this rank, with its host if the run spans hosts."""
    return f"rank {rank} on {socket.gethostname()}" if spans_hosts() else f"rank {rank}"


def describe_store() -> str:
    """Describe the process that hosts the store."""
    where = f" on {os.environ['MASTER_ADDR']}" if spans_hosts() else ""
    return f"process that hosts the ranks' store{where} (rank 0, or the launcher)"


def _name_dead_ranks(fault: str, dead: list[int], hosts: Mapping[int, str]) -> str:
    """Return `fault`, or a text that names the `dead` ranks if the fault is only a lost connection.

    For example, rank 0 announced its lost connection, but the cause is rank 3, which did not report: "rank 3 does not
    answer: its process is dead or stopped; rank 0 lost the connection (Connection reset by peer)".
    hosts: rank -> host name; empty on a single machine.
    """
    lost_connection = _LOST_CONNECTION.search(fault)
    if not dead or not lost_connection:
        return fault
    ranks = name_ranks(dead)
    names = dict.fromkeys(hosts[rank] for rank in dead if rank in hosts)  # each host once
    if names:
        ranks += f" on {', '.join(names)}"
    if len(dead) == 1:
        problem = f"{ranks} does not answer: its process is dead or stopped"
    else:
        problem = f"{ranks} do not answer: their processes are dead or stopped"
    if names:
        problem += ", or the network is down"
    # The fault begins with the rank that lost its connection: "rank 3 raised RuntimeError: Connection closed".
    return f"{problem}; {fault.split(' raised ')[0]} lost the connection ({lost_connection[0]})"


def format_reports(reports: dict[int, dict[str, Any]], world: int, hosts: Mapping[int, str]) -> list[str]:
    """Return the lines of a report: all ranks, grouped by equal stacks, each stack printed once.

    reports: keyed by rank; a rank that did not answer is absent. hosts: rank -> host name; empty on a single machine.
    """
    ranks_by_stack: dict[str, list[int]] = {}
    for rank in range(world):
        # Ranks that did not answer form a group, too, with an empty stack that is not printed.
        stack = reports[rank]["stack"] if rank in reports else ""
        ranks_by_stack.setdefault(stack, []).append(rank)
    lines = []
    for stack, ranks in ranks_by_stack.items():
        for rank in ranks:
            name = f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}"
            if rank in reports:
                report = reports[rank]
                lines.append(f"--- {name}, {report['what']}, for {report['since']:.1f} s")
                lines += [f"    {line}" for line in report.get("more", [])]
            else:
                unreachable = ", or its host cannot be reached" if hosts else ""
                lines.append(f"--- {name} does not answer: its process is dead or was stopped{unreachable}")
        if stack:
            lines.append(stack)
    return lines


def ticks_between_queries(rank: int, world: int) -> int:
    """Return every how many ticks of POLL_SECONDS `rank` asks the store for a fault.

    All ranks together make at most RANKS_PER_TICK queries in a tick, 800 in a second. Rank 0 asks in each tick, because
    it collects the reports of the others.
    """
    return 1 if rank == 0 else math.ceil(world / RANKS_PER_TICK)


class FaultBoard:
    """Exchange of a fault, and then of each rank's report about it, through torch's store.

    Rank 0 collects and prints the reports, and the other ranks wait until rank 0 has printed them.
    name: what is monitored, e.g. `pipeline`; reports begin with this name.
    delay: seconds after which the last rank learns of a fault, beyond the tick that each rank waits in a small run.
    """

    def __init__(self, name: str) -> None:
        # A separate connection: a call that blocks in another thread would block the calls on a shared one.
        self._store = default_store().clone()
        self.name = name
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.poll_ticks = ticks_between_queries(self.rank, self.world)
        # A rank that asks in every third tick may learn of a fault two ticks later than one that asks in every tick.
        # Rank 1 has the delay of all ranks except rank 0, which asks in every tick.
        self.delay = POLL_SECONDS * (ticks_between_queries(1, self.world) - 1)
        self.collect_seconds = COLLECT_SECONDS + self.delay  # how long rank 0 waits for reports

    def host_names(self) -> dict[int, str]:
        """Return rank -> host name, for all ranks that have written their hosts; none if the run is on one machine."""
        if not spans_hosts():
            return {}
        reported = [rank for rank in range(self.world) if self._store.check([f"{HOST_KEY}{rank}"])]
        return {rank: self._store.get(f"{HOST_KEY}{rank}").decode() for rank in reported}

    def has_fault(self) -> bool:
        """Return whether any rank has announced a fault. Raises torch's error if the store is unreachable."""
        return bool(self._store.check([FAULT_KEY]))

    def announce(self, fault: str, code: int = 0) -> None:
        """Publish the fault, unless another rank has already done so.

        code: exit code of all ranks, with a report of one line. If it is 0, the ranks exit with code 1 instead, and the
        report has all stacks.
        """
        if not self.has_fault():
            entry = json.dumps([fault, code])
            self._store.set(FAULT_KEY, entry)

    def report(self, report: dict[str, Any]) -> int:
        """Write this rank's report, wait until rank 0 has printed all reports, and return the announced exit code.

        Keys in the store: each rank writes tds/report/RANK. Rank 0 waits for them, prints, and writes PRINTED_KEY. Then
        the other ranks write tds/left/RANK, and rank 0 leaves last, because its process may host the store.
        report: the rank's activity `what`, its duration `since` in seconds, its `stack`, and further lines, `more`.
        """
        store = self._store
        fault, code = json.loads(store.get(FAULT_KEY))
        store.set(f"tds/report/{self.rank}", json.dumps(report))
        if self.rank == 0:
            # A fault with an exit code, such as Ctrl-C or a lack of memory, needs no stacks to be understood.
            self._print(fault, with_stacks=not code)
        else:
            # Rank 0 itself waits up to `collect_seconds` for the reports before it prints them.
            store.wait([PRINTED_KEY], timedelta(seconds=2 * self.collect_seconds))
            store.set(f"tds/left/{self.rank}", "1")
        return int(code)

    def _print(self, fault: str, with_stacks: bool) -> None:
        """Collect the reports of all ranks, print one report of them, and wait until the other ranks have read this."""
        ranks = set(range(self.world))
        answered = self._collect("tds/report", ranks)
        dead = sorted(ranks - answered)
        hosts = self.host_names()
        lines = [f"{self.name} stopped: {_name_dead_ranks(fault, dead, hosts)}"]
        if with_stacks:
            reports = {rank: json.loads(self._store.get(f"tds/report/{rank}")) for rank in answered}
            lines += format_reports(reports, self.world, hosts)
        say("\n".join(lines), error=True)
        # The other ranks wait for this key in `report`, and then write tds/left. Wait for them (not for this rank, 0),
        # because the store ends with this process if it hosts the store.
        self._store.set(PRINTED_KEY, "1")
        self._collect("tds/left", answered - {0})

    def _collect(self, key: str, ranks: set[int]) -> set[int]:
        """Wait until all `ranks` have written under `key`, or for `collect_seconds`; return those that have.

        One request asks for all ranks. Only after the wait, one request for each rank finds the ranks that are missing.
        """
        deadline = time.monotonic() + self.collect_seconds
        keys = [f"{key}/{rank}" for rank in ranks]
        while keys and time.monotonic() < deadline:
            if self._store.check(keys):  # True only if the store has all keys
                return ranks
            time.sleep(0.02)
        return {rank for rank in ranks if self._store.check([f"{key}/{rank}"])}

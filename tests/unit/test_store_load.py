"""The load of large runs on the process that hosts the ranks' store: queries per second, and open files."""

import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tds import store_host
from tds.diagnose import Activity, Watchdog
from tds.fault_board import POLL_SECONDS, ticks_between_queries
from tds.store_host import prepare_store_host, raise_open_files

A_SECOND = round(1 / POLL_SECONDS)  # ticks


class CountedBoard:
    """Stand-in for the fault board of one rank, which records the tick of each query."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.name, self.poll_ticks = rank, "pipeline", ticks_between_queries(rank, world)
        self.tick, self.queried = 0, list[int]()

    def has_fault(self) -> bool:
        self.queried.append(self.tick)
        return False


def _queries(rank: int, world: int, ticks: int) -> list[int]:
    """Run a watchdog's own loop for some ticks that take no time; return the ticks in which it queried the store."""
    watchdog: Any = object.__new__(Watchdog)
    board = watchdog._board = CountedBoard(rank, world)
    watchdog.timeout = float("inf")

    def poll() -> Iterator[None]:
        for board.tick in range(ticks):
            yield None

    watchdog._poll = poll
    watchdog._watch_faults()
    return board.queried


@pytest.mark.parametrize("world", [2, 200, 201, 500, 1024, 8192])
def test_all_ranks_together_make_less_than_a_thousand_queries_a_second(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 12
    total = Counter[int]()
    for rank in range(world):
        found = _queries(rank, world, seconds * A_SECOND)
        total.update(found)
        gaps = [late - early for early, late in zip(found, found[1:], strict=False)]
        longest = max([found[0], *gaps])
        assert longest <= (1 if world <= 200 or rank == 0 else 41), "a rank must learn of a fault soon"
    monkeypatch.delenv(store_host.NCCL_QUERIES, raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "1")
    prepare_store_host()
    by_torch = world / (int(os.environ.get(store_host.NCCL_QUERIES, "1000")) / 1000)
    for begin in range(seconds * A_SECOND - A_SECOND):
        ours = sum(total[begin + tick] for tick in range(A_SECOND))
        assert ours + by_torch <= 1010, f"{ours} + {by_torch} queries in a second"
    monkeypatch.delenv(store_host.NCCL_QUERIES, raising=False)


def test_a_rank_that_waits_too_long_reports_it_at_once() -> None:
    watchdog: Any = object.__new__(Watchdog)
    board = CountedBoard(rank=1, world=8192)
    announced = list[tuple[int, str]]()
    watchdog._board = SimpleNamespace(
        **vars(board), has_fault=lambda: False, announce=lambda words: announced.append((tick, words))
    )
    watchdog.timeout, watchdog._exit_lock = 5.0, SimpleNamespace(acquire=lambda blocking: False)
    tick = 0

    def poll() -> Iterator[Activity]:
        nonlocal tick
        for tick in range(3):
            yield Activity("waits", time.monotonic() - 10.0 * (tick == 1))

    watchdog._poll = poll
    watchdog._watch_faults()
    assert announced == [(1, "rank 1 exceeded the pipeline's timeout: 5 s in one operation")]


def test_a_given_interval_of_torch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8192")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(store_host.NCCL_QUERIES, "500")
    prepare_store_host()
    assert os.environ[store_host.NCCL_QUERIES] == "500"


@pytest.mark.parametrize(("rank", "agent"), [("0", True), ("0", False), ("1", True)])
def test_rank_0_raises_the_limits_of_the_processes_that_may_host_the_store(
    rank: str, agent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if agent:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    raised = dict[int, int]()
    monkeypatch.setattr(store_host, "raise_open_files", lambda pid, world: raised.update({pid: world}) or "too low")
    prepare_store_host()
    expected = {os.getpid(): 16} | ({os.getppid(): 16} if agent else {})
    assert raised == (expected if rank == "0" else {})
    assert capsys.readouterr().err == ("warning: too low\n" if rank == "0" else "")


@pytest.fixture
def process() -> Iterator[SimpleNamespace]:
    """A process whose limits of open files a test may change."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield SimpleNamespace(
            pid=child.pid, limits=lambda *new: resource.prlimit(child.pid, resource.RLIMIT_NOFILE, *new)
        )
        child.kill()


def test_the_soft_limit_is_raised_to_what_is_needed(process: SimpleNamespace) -> None:
    hard = process.limits()[1]
    process.limits((64, hard))
    assert raise_open_files(process.pid, 100) is None
    assert process.limits() == (4 * 100 + 512, hard)
    process.limits((1000, hard))
    assert raise_open_files(process.pid, 100) is None
    assert process.limits() == (1000, hard), "a limit that suffices stays"


def test_a_hard_limit_that_is_too_low_is_named(process: SimpleNamespace) -> None:
    process.limits((64, 100))
    assert raise_open_files(process.pid, 16) is None, "16 ranks are few enough"
    words = raise_open_files(process.pid, 8192)
    assert words is not None and "\n" not in words
    assert "8192 ranks may need 33280 open files, but the hard limit of its process is 100" in words
    assert "ulimit -n 33280" in words
    assert process.limits() == (100, 100)


def test_a_process_whose_limit_cannot_be_changed_is_named_if_it_matters() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert "cannot be raised" in str(raise_open_files(child.pid, 1000))
    assert raise_open_files(child.pid, 100) is None

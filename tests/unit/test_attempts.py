"""Ranks that launchers restart at different times meet in one attempt, under keys of its own in the shared store."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tds import attempts

Enter = Callable[[int], int]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setattr(attempts, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(attempts, "LINGER_SECONDS", 0.5)
    yield server


def entering(rank: int, found: dict[str, Any], name: str = "", seconds: float = 20) -> threading.Thread:
    """Start a process of a rank in a thread; `found` gets the number of its attempt, or its error."""

    def enter() -> None:
        timeout = timedelta(seconds=seconds)
        own_store = attempts.connect_to_store(timeout)
        try:
            if rank == 0:
                found[name or str(rank)] = attempts._begin_attempt(own_store, 3, timeout)
            else:
                found[name or str(rank)] = attempts._follow(own_store, rank, 3, timeout)
        except attempts.MeetingError as error:
            found[name or str(rank)] = error

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_all_ranks_enter_the_same_attempt_in_any_order(store: Any) -> None:
    for order, number in (((0, 1, 2), 1), ((2, 1, 0), 2)):
        found: dict[str, Any] = {}
        threads = []
        for rank in order:
            threads.append(entering(rank, found))
            time.sleep(0.1)
        join(*threads)
        assert found == {"0": number, "1": number, "2": number}


def test_a_rank_that_dies_before_the_attempt_begins_is_replaced_in_it(store: Any) -> None:
    found: dict[str, Any] = {}
    threads = [entering(0, found), entering(1, found, "died", seconds=0.1)]
    time.sleep(0.3)  # the first process of rank 1 waits and is gone
    threads.append(entering(1, found))
    time.sleep(0.3)  # else rank 2 could complete the attempt with the first process
    threads.append(entering(2, found))
    join(*threads)
    assert (found["0"], found["1"], found["2"]) == (1, 1, 1)


def test_a_rank_that_comes_again_waits_for_the_next_attempt_and_ends_the_present_one(store: Any) -> None:
    found: dict[str, Any] = {}
    join(*[entering(rank, found) for rank in range(3)])
    again = entering(1, found, "again")  # its launcher restarts it, while the others still wait for the process before
    time.sleep(0.3)
    assert b"rank 1" in store.get(f"{attempts.FAILED_KEY}1")
    assert "again" not in found
    join(entering(0, found), entering(2, found), again)
    assert (found["0"], found["again"], found["2"]) == (2, 2, 2)


def test_missing_ranks_are_named_on_all_ranks(store: Any) -> None:
    found: dict[str, Any] = {}
    join(entering(0, found, seconds=0.5), entering(1, found, seconds=0.5))
    for rank in ("0", "1"):
        assert "rank 2 of 3" in str(found[rank])
    found = {}
    store.set(attempts.COUNTER, "0")
    join(entering(2, found, seconds=0.3))
    assert "rank 0" in str(found["2"])


@pytest.mark.parametrize(("count", "local", "waits"), [("0", "1", False), ("1", "1", True), ("0", "2", True)])
def test_only_attempts_that_share_keys_with_others_get_their_own(
    store: Any, monkeypatch: pytest.MonkeyPatch, count: str, local: str, waits: bool
) -> None:
    """The first attempt on one node needs none; on several nodes, another node may be in a later attempt."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert attempts.enter_attempt(timedelta(seconds=20)) == waits


def test_the_process_group_of_an_attempt_is_bound_to_its_device(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for backend, wanted in (("nccl", torch.device("cuda", 0)), ("gloo", None)):
        attempts.join_attempt(3, backend, timedelta(seconds=20), torch.device("cuda", 0))
        assert given["device_id"] == wanted
        given["store"].set("key", "value")
        assert store.check(["attempt3/key"])

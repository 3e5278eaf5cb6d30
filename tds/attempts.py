"""Attempts of a run whose launcher restarts ranks: each attempt has keys of its own in the launcher's store.

torchrun and tools/launch.py keep one store for all attempts. Each attempt leaves addresses of ranks and perhaps a
failure report there, which would end the next one. On several nodes, each launcher counts its own restarts, so the
ranks agree on a number: rank 0 begins an attempt, and waits until all other ranks are there.

Keys: COUNTER, the number of the newest attempt; COUNTER N/R, written by rank R when it waits for attempt N; COUNTER N,
written by rank 0, empty when attempt N begins, else the reason why it does not.
"""

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .fault_board import RANKS_PER_TICK, name_ranks
from .messages import setting_advice

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 0.5
LINGER_SECONDS = 2.0  # how long a failed rank stays, as it may host the store from which the others read why
COUNTER = "tds/attempt"
FAILED_KEY = "tds/meeting failed, attempt "


class MeetingError(ValueError):
    """The ranks reached the store, but not each other."""


def connect_to_store(timeout: timedelta) -> Any:
    """Return a new connection to the launcher's store. It waits for the store, up to the timeout."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


def limit_text(timeout: timedelta) -> str:
    """Return how long a rank waits for the others, and how to change it."""
    return f"{timeout.total_seconds() / 60:g} minutes ({setting_advice['startup timeout']})"


def poll_seconds(world: int) -> float:
    """Return how often a rank may query the store: in 0.5 s, two ticks of a fault board, 2 x RANKS_PER_TICK ranks."""
    return max(POLL_SECONDS, POLL_SECONDS * world / (2 * RANKS_PER_TICK))


def enter_attempt(timeout: timedelta) -> int:
    """Wait for all ranks, and return the number of their attempt; 0 if it needs no keys of its own.

    Call it if all attempts share a store. Raises MeetingError if some ranks do not come in time.
    """
    env = os.environ
    world = int(env.get("WORLD_SIZE", "1"))
    # On one node, the first attempt finds an empty store, and all ranks are restarted together.
    is_first = env.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and env.get("LOCAL_WORLD_SIZE") == str(world)
    if is_first or dist.is_initialized():
        return 0
    store = connect_to_store(timeout)
    rank = int(env["RANK"])
    return _begin_attempt(store, world, timeout) if rank == 0 else _follow(store, rank, world, timeout)


def _begin_attempt(store: Any, world: int, timeout: timedelta) -> int:
    """On rank 0, begin a new attempt when all other ranks wait for it; return its number."""
    number: int = store.add(COUNTER, 1)
    key = f"{COUNTER} {number}"
    places = [f"{key}/{rank}" for rank in range(1, world)]
    try:
        store.wait(places, timeout)
    except dist.DistStoreError:
        missing = [rank for rank, place in enumerate(places, 1) if not store.check([place])]
        reason = (
            f"{name_ranks(missing)} of {world} did not start within {limit_text(timeout)}: start the missing ones, "
            "with the same MASTER_ADDR and MASTER_PORT"
        )
        store.set(key, reason)
        time.sleep(LINGER_SECONDS)
        raise MeetingError(reason) from None
    store.set(key, "")
    return number


def _follow(store: Any, rank: int, world: int, timeout: timedelta) -> int:
    """On another rank, wait until rank 0 begins an attempt in which this process takes part; return its number."""
    number = 0
    takes_part = False
    end = time.monotonic() + timeout.total_seconds() + LINGER_SECONDS  # rank 0 ends first, with a better message
    while time.monotonic() < end:
        newest = store.add(COUNTER, 0)
        key = f"{COUNTER} {newest}"
        has_begun = newest and store.check([key])
        if newest > number:
            number = newest
            takes_part = not has_begun
            if has_begun:  # with an earlier process of this rank, for which the others may still wait
                store.set(f"{FAILED_KEY}{number}", f"rank {rank} has been started again")
            else:
                store.set(f"{key}/{rank}", "")
        elif has_begun and takes_part:
            reason = store.get(key).decode()
            if reason:
                raise MeetingError(reason)
            return number
        time.sleep(poll_seconds(world))
    raise MeetingError(f"rank 0 did not start within {limit_text(timeout)}")


def join_attempt(number: int, backend: str, timeout: timedelta, device: "torch.device") -> None:
    """Create the process group of an attempt under its own keys in the launcher's store.

    device: this rank's device; an NCCL process group is bound to it, as in DeepSpeed.
    """
    world = int(os.environ["WORLD_SIZE"])
    # With a bound device, torch makes later groups by splitting the communicator of all ranks. DeepSpeed does not bind
    # a single rank, which has no peers.
    bound_device = device if backend == "nccl" and world > 1 else None
    dist.init_process_group(
        backend,
        store=PrefixStore(f"attempt{number}", connect_to_store(timeout)),
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timeout,
        device_id=bound_device,
    )

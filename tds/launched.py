"""Ranks end with the launcher that started them: one that is killed cannot end them, and what it leaves would train on for ever.

Only where a launcher says that it is one: a process started by hand, under nohup or tmux, outlives its parent rightly.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAUNCHER = "TDS_LAUNCHER"  # set by tools/launch.py to its process id and its PID namespace
THEIRS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")  # torchrun's and deepspeed's, whose ranks are their children
POLL_SECONDS = 0.5


def started(pid: int) -> str | None:
    """When a process of this machine was started, as its kernel counts; "" where it does not tell; None if it is not there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]  # it has ended, and nobody has asked how


def process_table() -> str:
    """Return which table of processes this process sees: the boot of its kernel and its PID namespace.

    Containers on one host may share its name, and each counts its processes from 1. "" where /proc is missing, or
    where it shows another table than that of this process.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class ImpossibleRanks(ValueError):
    """The environment says of this process what no launcher says."""


def refuse_impossible_ranks() -> None:
    """Raise ImpossibleRanks for numbers of ranks in the environment that no launcher sets; ranks would wait for each other in vain."""
    for name, total in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        given = {key: os.environ[key] for key in (name, total) if os.environ.get(key)}
        for key, text in given.items():
            if not re.fullmatch(r"[0-9]{1,9}", text) or (key == total and not int(text)):
                raise ImpossibleRanks(
                    f"{key}={text[:40]} in the environment is no number of ranks: unset it, or start a launcher"
                )
        if len(given) == 2 and int(given[name]) >= int(given[total]):
            raise ImpossibleRanks(
                f"{name}={given[name]} in the environment is beyond {total}={given[total]}: ranks count from 0, so the last one is "
                f"{int(given[total]) - 1}"
            )


def _is_gone() -> Callable[[], bool] | None:
    """What tells whether the launcher of this process is gone; None where no launcher started it."""
    if LAUNCHER in os.environ:
        number, _, namespace = os.environ[LAUNCHER].partition(" ")
        if namespace and namespace != process_table().partition(" ")[2]:
            return None  # the launcher is in another container, where its process cannot be looked up
        pid = int(number)
        begun = started(pid)
        return lambda: begun is None or started(pid) != begun
    if not any(name in os.environ for name in THEIRS):
        return None
    parent = os.getppid()
    return lambda: os.getppid() != parent or (parent == 1 and not _launches(1))


def _launches(pid: int) -> bool:
    """Whether a process may be a launcher: in a container the first process is one, elsewhere it takes in orphans."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return any(word in name for word in ("python", "torchrun", "deepspeed", "pt_elastic"))


def meet_again(backend: str, timeout: timedelta | None, device: "torch.device | None" = None) -> None:
    """Make the process group of a further attempt over the store that torchrun shares among all of them.

    device: of this rank, to which an NCCL group is bound, as DeepSpeed binds it.

    What an attempt before has left there, addresses of its ranks and the report of its end, would end this one, too.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attempt == "0" or not shared or dist.is_initialized():
        return
    store, rank, ranks = next(rendezvous("env://", timeout=timeout or timedelta(minutes=30)))
    own = PrefixStore(f"attempt{attempt}", store)
    bound = device if backend == "nccl" and ranks > 1 else None
    dist.init_process_group(backend, store=own, rank=rank, world_size=ranks, timeout=timeout, device_id=bound)


class _Watch:
    thread: threading.Thread | None = None


def end_with_launcher() -> None:
    """From now on a thread looks for the launcher, and ends this process when it is gone."""
    is_gone = _is_gone()
    if is_gone is None or (_Watch.thread is not None and _Watch.thread.is_alive()):
        return
    _Watch.thread = threading.Thread(target=_watch, args=(is_gone,), name="tds-launched", daemon=True)
    _Watch.thread.start()


def _watch(is_gone: Callable[[], bool]) -> None:
    while not is_gone():
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(Exception):  # whoever read it may be gone, too
        print(f"rank {os.environ.get('RANK', '0')} ends: its launcher is gone", file=sys.stderr, flush=True)
    os._exit(1)

"""Exit of ranks whose launcher has died: a killed launcher cannot end its ranks, which would keep training forever.

This applies only if environment variables show that a launcher started the process. A process started by hand, under
nohup or tmux, may outlive its parent.
"""

import contextlib
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .messages import exit_with_error

LAUNCHER_VARIABLE = "TDS_LAUNCHER"  # set by megatron_tools/launch.py to its process id and its PID namespace
OTHER_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")  # set by torchrun, DeepSpeed: parents of their ranks
POLL_SECONDS = 0.5


def start_time_of(pid: int) -> str | None:
    """Return the start time of a local process in kernel ticks; "" if unknown; None if there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # it exists, as a process of another user
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # For example, "4711 (python) S 1 4711 ...": the name in parentheses may contain spaces, so split what follows it,
    # field 3 (state) and fields 4, 5, ...
    state, *fields = text.rpartition(")")[2].split()
    if state in ("Z", "X"):  # zombie or dead
        return None
    return fields[18]  # field 22 of the file, starttime in proc(5)


def pid_namespace() -> str:
    """Return the name of the PID namespace whose processes this process sees.

    Each container numbers its processes from 1, so a process id is valid in one namespace only. Returns "" if /proc is
    missing or shows the processes of another namespace.
    """
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return os.readlink("/proc/self/ns/pid")
    return ""


class ImpossibleRanks(ValueError):
    """Rank numbers in the environment that no launcher sets."""


def refuse_impossible_ranks() -> None:
    """Raise ImpossibleRanks if RANK is not below WORLD_SIZE, or LOCAL_RANK not below LOCAL_WORLD_SIZE.

    Also raise it if one of these environment variables is not a number. With such values, ranks would hang.
    """
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank = _read_number(name, 0)
        ranks = _read_number(size, 1)
        if rank is not None and ranks is not None and rank >= ranks:
            raise ImpossibleRanks(
                f"{name}={os.environ[name]} in the environment is beyond {size}={os.environ[size]}: ranks count from "
                f"0, so the last one is {ranks - 1}"
            )


def _read_number(name: str, minimum: int) -> int | None:
    """Return the number in an environment variable, or None if it is unset. Raises ImpossibleRanks below `minimum`."""
    text = os.environ.get(name)
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise ImpossibleRanks(
            f"{name}={text[:40]} in the environment is not a valid number: unset it, or use a launcher"
        )
    return int(text)


def spans_hosts() -> bool:
    """Return whether some ranks of this run may be on other hosts."""
    env = os.environ
    world = env.get("WORLD_SIZE", "1")
    # torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
    local_world = env.get("LOCAL_WORLD_SIZE") or env.get("LOCAL_SIZE") or "1"
    master = env.get("MASTER_ADDR", "localhost")
    is_local = master == "localhost" or is_loopback(master)  # ranks on other hosts could not reach this master
    return world not in (local_world, "1") and not is_local


def is_loopback(address: str) -> bool:
    """Return whether a numeric address is one of the loopback device. A name is not: other hosts may resolve it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _launcher_check() -> Callable[[], bool] | None:
    """Return a function that checks whether this process's launcher has died; None if there is no launcher to check."""
    if LAUNCHER_VARIABLE in os.environ:
        return _own_launcher_check(os.environ[LAUNCHER_VARIABLE])
    if not any(name in os.environ for name in OTHER_LAUNCHERS):
        return None
    # The parent changes when it dies. If it is PID 1 from the start, it has died already, unless PID 1 is the launcher.
    parent = os.getppid()

    def is_gone() -> bool:
        is_orphan = parent == 1 and not _init_may_be_launcher()
        return is_orphan or os.getppid() != parent

    return is_gone


def _own_launcher_check(launcher: str) -> Callable[[], bool] | None:
    """Return `_launcher_check` for this project's launcher.

    launcher: process id and, if known, PID namespace, e.g. "4711 pid:[4026531836]".
    """
    number, _, namespace = launcher.partition(" ")
    if namespace and namespace != pid_namespace():
        return None  # the launcher runs in another container, so its process is not visible here
    pid = int(number)
    start_time = start_time_of(pid)  # None if the launcher has died already
    # Another process may get the launcher's process id, but it has another start time.
    return lambda: start_time is None or start_time_of(pid) != start_time


def _init_may_be_launcher() -> bool:
    """Return whether the process with PID 1 may be a launcher, by its name.

    In a container, PID 1 may be the launcher. Elsewhere PID 1 is the system's init process, which adopts orphans.
    """
    try:
        name = Path("/proc/1/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return any(word in name for word in ("python", "torchrun", "deepspeed", "pt_elastic"))


def end_with_launcher() -> None:
    """Start a thread that ends this process when its launcher has died."""
    is_gone = _launcher_check()
    is_watched = any(thread.name == "tds-launched" for thread in threading.enumerate())
    if is_gone is None or is_watched:
        return
    start_thread("tds-launched", _exit_when_gone, is_gone)


def start_thread(name: str, function: Callable[..., None], *args: Any) -> threading.Thread:
    """Call a function in a thread that does not keep the process alive; return the thread."""
    thread = threading.Thread(target=function, args=args, name=name, daemon=True)
    thread.start()
    return thread


def _exit_when_gone(is_gone: Callable[[], bool]) -> None:
    """Wait until `is_gone()` is true, then report that and end this process."""
    while not is_gone():
        time.sleep(POLL_SECONDS)
    exit_with_error(f"rank {os.environ.get('RANK', '0')} ends: its launcher has died")

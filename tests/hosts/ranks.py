"""Ranks on hosts of a lab: one for each host, forked from the fork server of tests.support."""

import contextlib
import ctypes
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import End, _context, _end

from .lab import Host, Lab

NAMESPACES = ("net", "uts", "mnt")


class Rank:
    """A rank on a host. log: file with all that it prints."""

    def __init__(self, host: Host, log: Path, body: Callable[..., Any], args: Sequence[Any], env: Mapping[str, str]):
        self.log = log
        self._process = _context.Process(target=_rank_main, args=(host.pid, str(log), env, body, args), daemon=True)
        self._process.start()
        self._begin = time.monotonic()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self, timeout: float) -> End:
        """Wait at most `timeout` seconds for the end of this rank; return how it ended, with all that it printed."""
        self._process.join(timeout)
        code = self._process.exitcode
        took = time.monotonic() - self._begin
        if code is None:
            self.kill()
        return End(code, self.log.read_text(), took)


def start_ranks(lab: Lab, folder: Path, body: Callable[..., Any], *args: Any, **env: str) -> list[Rank]:
    """Start `body(*args)` as one rank on each host; the first host is MASTER_ADDR. folder: for their logs."""
    ranks = []
    for number, host in enumerate(lab.hosts):
        own = {"RANK": str(number), "WORLD_SIZE": str(len(lab.hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": lab.hosts[0].name, "MASTER_PORT": "29500", **env}
        ranks.append(Rank(host, folder / f"rank{number}.log", body, args, own))
    return ranks


def ends_on_hosts(lab: Lab, folder: Path, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[End]:
    """Run `body(*args)` as one rank on each host; return how the ranks ended. Ranks that do not end are killed."""
    ranks = start_ranks(lab, folder, body, *args)
    deadline = time.monotonic() + timeout
    return [rank.end(max(deadline - time.monotonic(), 0)) for rank in ranks]


def _rank_main(pid: int, log: str, env: Mapping[str, str], body: Callable[..., Any], args: Sequence[Any]) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # allows data workers
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(f"/proc/{pid}/ns/{name}")) for name in NAMESPACES]
        for each in files:
            if libc.setns(each.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(env, OMP_NUM_THREADS="1")
    try:
        body(*args)
    except SystemExit as error:
        _end(int(error.code or 0))
    except BaseException:
        traceback.print_exc()
        _end(1)
    sys.stdout.flush()
    _end(0)

"""Errors instead of hangs: when one rank fails, dies or stalls, all of them end, and rank 0 says where each one stood.

Every rank has a thread that looks at a shared store a few times a second. Whoever fails or waits
too long writes so there; then each rank writes what it is doing and its stack, rank 0 prints all
of it, and everybody leaves with code 1. The store is torch's own, used through a connection of
its own, so that a blocked collective does not block it.
"""

import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.25
COLLECT_SECONDS = 3.0  # how long rank 0 waits for the reports of the others
FAULT, PRINTED = "tds/fault", "tds/printed"


def _store() -> Any:
    """A connection of our own to the store that the ranks met at."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


class Watchdog:
    """Knows what this rank is doing, and ends it when any rank is in trouble.

    timeout: seconds that one thing may take. describe: turns what was given to `at` into words,
    called only for a report; it is not kept alive. Of several in one process, e.g. of two engines,
    the one that was told something last is the one that looks out.
    """

    _latest: "Watchdog | None" = None

    def __init__(self, timeout: float, describe: Callable[[Any], str]) -> None:
        self.timeout, self._describe = timeout, weakref.WeakMethod(describe)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._doing: tuple[Any, float] | None = None
        self._main = threading.main_thread().ident or 0
        self._store = _store()
        self._ending = threading.Lock()
        Watchdog._latest = self
        threading.Thread(target=self._watch, name="tds-watchdog", daemon=True).start()

    def at(self, what: Any) -> None:
        """From now on this rank does `what`; None: nothing that others could wait for."""
        self._doing = None if what is None else (what, time.monotonic())
        if what is not None:
            Watchdog._latest = self

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one failed; returns when rank 0 has printed the report."""
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * COLLECT_SECONDS)  # the thread is about to end this process
        text = "".join(traceback.format_exception(error)).rstrip()
        try:
            self._announce(f"rank {self.rank} raised {type(error).__name__}: {error}")
        except Exception:  # rank 0, which keeps the store, is gone
            self._leave(f"rank {self.rank} lost the connection to the other ranks", text)
        self._report(text)

    def _watch(self) -> None:
        while self._describe() is not None:  # as long as there is an engine
            time.sleep(POLL_SECONDS)
            doing = self._doing
            if Watchdog._latest is not self:
                continue
            try:
                fault = bool(self._store.check([FAULT]))
            except Exception:
                if doing is None:
                    return  # the run is over, or as good as over
                self._leave(f"rank {self.rank} lost the connection to the other ranks")
                return
            if doing is not None and time.monotonic() - doing[1] > self.timeout:
                self._announce(f"rank {self.rank} has been {self.timeout:g} s at one thing (the pipeline's timeout)")
                fault = True
            if fault and self._ending.acquire(blocking=False):
                self._report(self._stack())
                os._exit(1)

    def _announce(self, fault: str) -> None:
        if not self._store.check([FAULT]):
            self._store.set(FAULT, fault)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)).rstrip() if frame else "no stack"

    def _report(self, stack: str) -> None:
        """Write where this rank stands; rank 0 prints what all have written, the others wait for it."""
        doing = self._doing
        describe = self._describe()
        what = "between two steps" if doing is None or describe is None else describe(doing[0])
        since = 0.0 if doing is None else time.monotonic() - doing[1]
        content = json.dumps({"what": what, "since": since, "stack": stack})
        try:
            self._store.set(f"tds/report/{self.rank}", content)
            if self.rank == 0:
                self._print()
                self._store.set(PRINTED, "1")
            else:
                self._store.wait([PRINTED], timedelta(seconds=2 * COLLECT_SECONDS))
        except Exception:
            self._leave(f"rank {self.rank}: {what} for {since:.1f} s; rank 0 does not answer", stack)

    def _print(self) -> None:
        end = time.monotonic() + COLLECT_SECONDS
        keys = {rank: f"tds/report/{rank}" for rank in range(self.world)}
        while time.monotonic() < end and not all(self._store.check([key]) for key in keys.values()):
            time.sleep(0.05)
        lines = [f"pipeline stopped: {self._store.get(FAULT).decode()}"]
        for rank, key in keys.items():
            if not self._store.check([key]):
                lines.append(f"--- rank {rank} does not answer: its process is dead or was stopped")
                continue
            report = json.loads(self._store.get(key))
            lines.append(f"--- rank {rank}, {report['what']}, for {report['since']:.1f} s\n{report['stack']}")
        print("\n".join(lines), file=sys.stderr, flush=True)

    def _leave(self, why: str, stack: str = "") -> None:
        print("\n".join([f"pipeline stopped: {why}", stack or self._stack()]), file=sys.stderr, flush=True)
        os._exit(1)

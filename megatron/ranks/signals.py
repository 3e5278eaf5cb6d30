"""Orderly end of a run: on a signal or after a time limit every rank saves and stops at the same iteration.

SIGTERM, --exit-duration-in-mins    save, then exit with code 0
Ctrl-C (SIGINT)                     same as SIGTERM; a second one exits at once
SIGUSR1                             save and continue
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from . import device as device_module
from .errors import exit_now

BEGIN = time.monotonic()
# Signals within this time are one request: a terminal signals the whole process group, and the launcher then signals
# its ranks again.
ONE_REQUEST_SECONDS = 0.5
INTERRUPTED = 130  # exit code that shells report for a process ended by Ctrl-C


def _print(words: str) -> None:
    """Write a line to stderr on rank 0. Signal handlers must not use Python's file objects, so this uses os.write."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # an exception in a handler would end the run before it has saved
            os.write(2, f"{os.path.basename(sys.argv[0])}: {words}\n".encode())


class StopSignal(IntEnum):
    """Request that a signal makes; if ranks receive different requests, the one with the greatest value wins."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers when the context ends; ignore SIGUSR1 until the loop installs its own handlers.

    Before the loop there is nothing to save, so SIGTERM and Ctrl-C end the process as usual.
    """
    if threading.current_thread() is not threading.main_thread():  # Python lets only the main thread set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Context manager around the loop that handles signals; call `agree()` after every iteration, on every rank.

    After a successful loop the handlers stay installed, so that no signal ends the process during the final save.

    minutes: stop after this run time of the process; None for no limit.
    device: holds the tensors that the ranks exchange.
    """

    def __init__(self, minutes: float | None, device: torch.device) -> None:
        self._minutes, self._device = minutes, device
        self._request = StopSignal.NOTHING
        self._interrupted: float | None = None  # time of the first Ctrl-C
        self._reports: Callable[[], list[int]] | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._note(StopSignal.SAVE_AND_STOP))
            signal.signal(signal.SIGUSR1, lambda *_: self._note(StopSignal.SAVE))
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # else the launcher handles it for all ranks
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if self._reports is not None:
                self._reports()
        elif threading.current_thread() is threading.main_thread():
            # After an error nothing will be saved, other ranks may be gone, and the launcher must be able to end
            # this process.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, request: StopSignal) -> None:
        self._request = max(self._request, request)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            self._note(StopSignal.SAVE_AND_STOP)
            _print("Ctrl-C: saves after this iteration and ends; press it again to end at once")
        elif now - self._interrupted > ONE_REQUEST_SECONDS:
            _print("Ctrl-C again: ended at once")
            exit_now(INTERRUPTED)

    def agree(self, done: bool = False) -> tuple[StopSignal, bool]:
        """Return (strongest request of any rank, whether all ranks are `done`), alike on all ranks.

        With several ranks, the result is what the ranks reported at the previous call. The present reports are
        all-reduced asynchronously on the default process group while the ranks compute, so no iteration waits for them.
        On an accelerator the host waits only for the all-reduce that the previous call has queued.
        """
        request, self._request = self._request, StopSignal.NOTHING
        if self._minutes is not None and time.monotonic() - BEGIN > 60 * self._minutes:
            request = StopSignal.SAVE_AND_STOP
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return request, done
        before, self._reports = self._reports, self._send([int(request), int(not done)])
        if before is None:
            return StopSignal.NOTHING, False
        most, any_not_done = before()
        return StopSignal(most), not any_not_done

    def _send(self, mine: list[int]) -> Callable[[], list[int]]:
        """Start a MAX all-reduce of this rank's values; return a function that waits for the result."""
        sent = device_module.sent(mine, self._device)
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, async_op=True)
        if self._device.type == "cpu":

            def received() -> list[int]:
                work.wait()
                return sent.tolist()

            return received
        work.wait()  # blocks the device's stream, not the host
        return device_module.start_reading(sent)

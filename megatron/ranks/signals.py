"""Orderly end of a run: on a signal or after a time limit, every rank saves and stops after the same iteration.

SIGTERM, --exit-duration-in-mins    save, then exit with code 0
Ctrl-C (SIGINT)                     same as SIGTERM; a second Ctrl-C exits at once
SIGUSR1                             save and continue
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType

import torch
import torch.distributed as dist

from ..data.workers import SIGNALS, in_main_thread
from . import device as device_module
from .errors import exit_now
from .rank_0 import num_ranks

# SIGINTs within this time are one Ctrl-C: the terminal signals the whole process group, and the launcher then signals
# its ranks again.
ONE_REQUEST_SECONDS = 0.5
INTERRUPTED = 130  # exit code that shells report for a process ended by Ctrl-C


def _print_in_handler(words: str) -> None:
    """Write a line to stderr on rank 0. Signal handlers must not use Python's file objects, so this uses os.write."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # an exception in a signal handler would end the run without a save
            os.write(2, f"{os.path.basename(sys.argv[0])}: {words}\n".encode())


class StopSignal(IntEnum):
    """Request made by a signal. If ranks receive different requests, the request with the greatest value wins."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers at the end of the `with` block; ignore SIGUSR1 until `StopSignals` handles signals.

    The block is one run, so the time of --exit-duration-in-mins begins with it.
    Before the training loop there is nothing to save, so SIGTERM and Ctrl-C end the process as usual.
    """
    StopSignals.run_start = time.monotonic()
    if not in_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass
class StopSignals:
    """Context manager that handles signals during the training loop.

    Every rank must call `agree()` after every iteration. After a successful loop the handlers stay installed, so that
    no signal ends the process during the final save.

    minutes: time since the start of the run after which to save and stop; None for no limit.
    device: device of the tensors that the ranks exchange.
    """

    minutes: float | None
    device: torch.device
    run_start = time.monotonic()  # no field: `restored_signals` sets it at the start of each run of this process

    def __post_init__(self) -> None:
        self._requests = [StopSignal.NOTHING]  # since the last call of `agree`
        self._interrupted: float | None = None  # time of the first Ctrl-C
        self._read_reports: Callable[[], list[int]] | None = None

    def __enter__(self) -> "StopSignals":
        if in_main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.ask(StopSignal.SAVE_AND_STOP))
            signal.signal(signal.SIGUSR1, lambda *_: self.ask(StopSignal.SAVE))
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # if SIGINT is ignored, the launcher handles Ctrl-C
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:  # the handlers stay installed for the final save
            if self._read_reports:
                self._read_reports()  # wait for the last all-reduce, whose result nobody needs
        elif in_main_thread():
            # After an error, nothing will be saved and other ranks may have ended. The launcher must be able to end
            # this process.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def ask(self, request: StopSignal) -> None:
        """Make a request, as if a signal had come."""
        self._requests.append(request)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        """Handle SIGINT: save and stop at the first Ctrl-C, exit at the second, ignore repetitions of the first."""
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            self.ask(StopSignal.SAVE_AND_STOP)
            _print_in_handler("Ctrl-C: the run saves after this iteration and ends; press Ctrl-C again to end at once")
        elif now - self._interrupted > ONE_REQUEST_SECONDS:
            _print_in_handler("second Ctrl-C: the run ends at once, without saving")
            exit_now(INTERRUPTED)

    def agree(self, done: bool = False) -> tuple[StopSignal, bool]:
        """Return (greatest request of any rank, whether all ranks are done); the result is the same on all ranks.

        done: whether this rank has finished the work that all ranks wait for, such as writing its part of a checkpoint.
        With several ranks, the result comes from the arguments and requests of the previous call. The argument and the
        request of this call are all-reduced asynchronously on the default process group while the ranks compute, so
        that no iteration waits. On an accelerator, the host waits only for the all-reduce that the previous call has
        queued.
        """
        # A handler may run between any two operations. Its request goes to the list that is read below, or to the new
        # list.
        requests = self._requests
        self._requests = [StopSignal.NOTHING]
        request = max(requests)
        if self.minutes is not None and time.monotonic() - self.run_start > 60 * self.minutes:
            request = StopSignal.SAVE_AND_STOP
        if num_ranks() == 1:
            return request, done
        read_previous = self._read_reports  # None in the first call
        # The maximum of `not done` is 0 if all ranks are done.
        self._read_reports = self._start_max([int(request), int(not done)])
        if read_previous is None:
            return StopSignal.NOTHING, False
        max_request, any_not_done = read_previous()
        return StopSignal(max_request), not any_not_done

    def _start_max(self, own_values: list[int]) -> Callable[[], list[int]]:
        """Start a MAX all-reduce of this rank's values; return a function that waits for the result."""
        values = torch.tensor(own_values, pin_memory=self.device.type != "cpu")
        max_values = values.to(self.device, non_blocking=True)  # without blocking the host
        work = dist.all_reduce(max_values, op=dist.ReduceOp.MAX, async_op=True)
        if self.device.type == "cpu":

            def read() -> list[int]:
                work.wait()
                return max_values.tolist()

            return read
        work.wait()  # makes the device's stream wait, not the host
        return device_module.start_copy_to_host(max_values)

"""Ending a run in order: at a signal or after a given time every rank saves and stops at the same iteration.

SIGTERM, --exit-duration-in-mins    save, then end with code 0
Ctrl-C (SIGINT)                     the same; the second one ends at once
SIGUSR1                             save, and go on
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
ONE_REQUEST_SECONDS = 0.5  # a terminal tells the whole group, and a launcher its ranks once more
INTERRUPTED = 130  # what a shell says of a process that Ctrl-C ended


def _say(words: str) -> None:
    """From the handler of a signal, in which Python's own files must not be touched."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a handler that raises would end the run before it has saved
            os.write(2, f"{os.path.basename(sys.argv[0])}: {words}\n".encode())


class StopSignal(IntEnum):
    """What the outside asks for; of what several ranks are asked the greatest counts."""

    NOTHING = 0
    SAVE = 1
    SAVE_AND_STOP = 2


@contextmanager
def signals_as_before() -> Iterator[None]:
    """Around a whole run. Before the loop there is nothing to save: SIGUSR1 does nothing, SIGTERM and Ctrl-C end the process."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other set handlers
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
    """Use as a context manager around the loop; `agree()` after every iteration, on every rank.

    When the loop has ended well, signals are still heard, so that none ends the process while it saves for the last time.

    minutes: stop when the process has run so long; None for never. device: where the ranks' messages are.
    """

    def __init__(self, minutes: float | None, device: torch.device) -> None:
        self._minutes, self._device = minutes, device
        self._asked = StopSignal.NOTHING
        self._interrupted: float | None = None  # when Ctrl-C was
        self._told: Callable[[], list[int]] | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._ask(StopSignal.SAVE_AND_STOP))
            signal.signal(signal.SIGUSR1, lambda *_: self._ask(StopSignal.SAVE))
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a launcher hears it for all ranks
                signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if self._told is not None:
                self._told()
        elif threading.current_thread() is threading.main_thread():
            # There is nothing to save, the others may not be there any more, and who has started this process may end it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _ask(self, asked: StopSignal) -> None:
        self._asked = max(self._asked, asked)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted = now
            self._ask(StopSignal.SAVE_AND_STOP)
            _say("Ctrl-C: saves after this iteration and ends; once more ends at once")
        elif now - self._interrupted > ONE_REQUEST_SECONDS:
            _say("Ctrl-C again: ended at once")
            exit_now(INTERRUPTED)

    def agree(self, done: bool = False) -> tuple[StopSignal, bool]:
        """(what any rank was asked for, whether all ranks are `done`), alike on all ranks.

        Of several ranks it is what they said one call ago: what they say now is on its way, among the world's other
        messages, while they compute, so that no iteration waits for it. (On an accelerator the host waits until the iteration
        before the last is done.)
        """
        asked, self._asked = self._asked, StopSignal.NOTHING
        if self._minutes is not None and time.monotonic() - BEGIN > 60 * self._minutes:
            asked = StopSignal.SAVE_AND_STOP
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return asked, done
        before, self._told = self._told, self._tell([int(asked), int(not done)])
        if before is None:
            return StopSignal.NOTHING, False
        most, any_not_done = before()
        return StopSignal(most), not any_not_done

    def _tell(self, mine: list[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of what each rank says; what is returned waits for it."""
        sent = device_module.sent(mine, self._device)
        work = dist.all_reduce(sent, op=dist.ReduceOp.MAX, async_op=True)
        if self._device.type == "cpu":

            def received() -> list[int]:
                work.wait()
                return sent.tolist()

            return received
        work.wait()  # it is the device that waits
        return device_module.read_later(sent)

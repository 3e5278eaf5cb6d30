"""Errors instead of hangs: if one rank fails, dies or stalls, all ranks exit, and rank 0 reports what each was doing.

A thread in every rank polls the store of torch.distributed: a few times a second in runs of up to 200 ranks, less often
in larger runs (`fault_board.py`). A rank that fails or waits too long writes a description of the fault to the store.
Then every rank writes its current activity and its stack to the store. Rank 0 prints the activities and stacks, and all
ranks exit with code 1. The thread has a separate connection to the store, which a blocked collective does not block. If
the process that hosts the store stalls, a second thread ends each rank without the store.
"""

import atexit
import contextlib
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import schedule
from .fault_board import COLLECT_SECONDS, POLL_SECONDS, FaultBoard, describe_store, name_this_rank
from .messages import error_text, exit_with_error, flush_and_exit, shortened
from .observers import Observer
from .parent_death import start_thread
from .recorder import DeviceProgress, allocation_retries, pending_collectives

SILENCE_SECONDS = 4 * COLLECT_SECONDS  # how long the store may not answer, including the time for reports
_CPP_STACK = re.compile(
    r"\n?(Exception raised from [^\n]*|C\+\+ CapturedTraceback:)\n((frame )?#\d+[:\s][^\n]*(\n|$)|\n(?=(frame "
    r")?#\d+[:\s]))*"
)
# Characters of an error that a report shows in its first line and below the stack.
MAX_MESSAGE_CHARS, MAX_STACK_CHARS = 2_000, 16_000
EXIT_INTERRUPTED = 130  # exit code that a shell gives to a process ended by Ctrl-C


def _install_excepthook() -> None:
    """Install an excepthook that prints an uncaught error unless rank 0's report already contains the error."""
    previous_hook = sys.excepthook
    if hasattr(previous_hook, "is_tds_hook"):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        latest = Watchdog.latest
        # Errors inside a step have been reported by `watching`. Outside of steps, report only Ctrl-C, and before the
        # first engine exists (see `watch_startup`) every error.
        if latest and (isinstance(error, KeyboardInterrupt) or latest.reports_all_errors):
            latest.fail(error)
        if not getattr(error, "tds_reported", False):  # rank 0 has not printed it
            previous_hook(kind, error, trace)

    hook.is_tds_hook = True  # type: ignore[attr-defined]
    sys.excepthook = hook


CHANNELS = {
    schedule.RecvActivation: "from_previous",
    schedule.SendActivation: "to_next",
    schedule.RecvGrad: "from_next",
    schedule.SendGrad: "to_previous",
}


def describe_activity(what: Any, stage: int, neighbours: Any) -> str:
    """Describe what a rank is doing. what: a schedule instruction, or a text for any other activity."""
    where = f"stage {stage}"
    if not isinstance(what, schedule.Instruction):
        return f"{where}, {what}"
    text = f"{where}, in {type(what).__name__} of micro-batch {what.micro}"
    if neighbours.chunks > 1:
        text += f", chunk {what.chunk}"
    if type(what) in CHANNELS:
        text += f", {getattr(neighbours, CHANNELS[type(what)])}"
    return text


def out_of_memory(error: BaseException) -> str | None:
    """Return `is out of memory (...)` with the text of an out-of-memory error, or None for any other error."""
    text = " ".join(error_text(error).split())
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in text:
        return None
    return f"is out of memory ({text[:300] or type(error).__name__})"


def strip_cpp_stacks(text: str) -> str:
    """Return `text` without the C++ stacks that torch puts into its error messages."""
    return _CPP_STACK.sub("", text)


class Activity(NamedTuple):
    """What a rank does, as given to `Watchdog.record`, and the time when it began."""

    what: Any
    since: float


class Watchdog(Observer):
    """Monitor of what this rank does: `record` records an activity, and `fail` announces an error on the fault board.

    One thread ends the rank when any rank has announced a fault or an activity takes too long. Another thread ends
    the rank when the fault board does not answer. If a process has several watchdogs, e.g. for two engines, only the
    watchdog whose `record` was called last is active.

    timeout: seconds allowed for one activity.
    describe: a method, held by weak reference, that turns an argument of `record` into text; None: use `str`.
    name: what is monitored, e.g. `pipeline`; reports begin with this name.
    device: an accelerator whose progress is reported.
    idle: text that describes this rank in a report while no activity is recorded.
    """

    latest: "Watchdog | None" = None
    reports_all_errors = False  # whether to report uncaught errors outside steps, too
    advice = (
        "to save memory, use smaller micro-batches (train_micro_batch_size_per_gpu), recompute activations "
        "(activation_checkpoint_interval), or use more stages or tensor-parallel ranks"
    )

    def __init__(
        self,
        timeout: float,
        describe: Callable[[Any], str] | None,
        name: str = "pipeline",
        device: torch.device | None = None,
        idle: str = "between two steps",
    ) -> None:
        self.timeout = timeout
        self._idle = idle
        self._board = FaultBoard(name)
        self._describe: Callable[[], Callable[[Any], str] | None]
        # `self._describe()` returns the function that describes an activity, or None if the engine is gone.
        self._describe = weakref.WeakMethod(describe) if describe else lambda: str
        self._activity: Activity | None = None
        self._device_progress = DeviceProgress(device) if device is not None and device.type != "cpu" else None
        self._exit_lock = threading.Lock()
        Watchdog.latest = self
        _install_excepthook()
        self._stopped = threading.Event()
        self._answered = time.monotonic()
        targets = (self._watch_faults, self._watch_board)
        self._threads = [start_thread("tds-watchdog", target) for target in targets]
        atexit.register(self._stop)

    def record(self, what: Any) -> None:
        """Record that this rank now does `what`; None: this rank does nothing that other ranks may wait for."""
        if self._device_progress and self._activity:
            # The activity that ends here has submitted all its work, which the device may still have to do.
            with contextlib.suppress(RuntimeError):  # the device has failed; the next synchronization will report it
                self._device_progress.record_submitted(self._activity.what)
        self._activity = None if what is None else Activity(what, time.monotonic())
        if what is not None:
            Watchdog.latest = self  # of several watchdogs, such as those of two engines, only the latest is active

    def begin(self, what: Any) -> None:
        """Record that this rank begins an instruction; the other parts of a step say themselves when they wait."""
        if isinstance(what, schedule.Instruction):
            self.record(what)

    def waiting(self, doing: str) -> None:
        """Record that this rank may now wait for other ranks."""
        self.record(doing)

    @contextlib.contextmanager
    def watching(self, *unreported: type[BaseException]) -> Iterator[None]:
        """Report an error in this block to the other ranks, which may be waiting for this rank.

        An error whose attribute `everywhere` is true is not reported, because all ranks raise it.
        unreported: classes of errors that are not reported either.
        """
        try:
            yield
        except unreported:
            raise
        except BaseException as error:
            if not getattr(error, "everywhere", False):
                self.fail(error)
            raise
        finally:
            self.record(None)  # this rank now does nothing that others may wait for

    def fail(self, error: BaseException) -> None:
        """Announce to all ranks that this rank failed; return when rank 0 has printed the report.

        After Ctrl-C or an out-of-memory error, the report is one line without stacks, and this method ends the
        process.
        """
        if not self._exit_lock.acquire(blocking=False):
            # Another thread is already ending this process; wait for the end.
            time.sleep(2 * self._board.collect_seconds)
        # The traceback begins in the frame that caught the error, so the frames that called it are put before it. Those
        # of contextlib, which lie between `watching` and the code that it surrounds, are left out.
        frame = error.__traceback__.tb_frame.f_back if error.__traceback__ else None
        lines = [line for line in traceback.format_stack(frame) if "contextlib.py" not in line] if frame else []
        lines += traceback.format_exception(error)
        text = shortened(strip_cpp_stacks("".join(lines)).rstrip(), MAX_STACK_CHARS)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if is_interrupt and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore the second SIGINT, which launchers send
        rank = name_this_rank(self._board.rank)
        fault, code = self._describe_fault(error)
        try:
            self._board.announce(f"{rank} {fault}", code)
        except Exception:  # rank 0, which hosts the store, is gone
            self.exit_with_stack(f"{rank} lost the connection to the {describe_store()}", "" if is_interrupt else text)
        # The announced fault has an exit code after Ctrl-C or an out-of-memory error: all ranks end now. Otherwise the
        # code is 0, and this method returns, so that the error itself ends this rank.
        if code := self._report(text):
            flush_and_exit(code)
        error.tds_reported = True  # type: ignore[attr-defined]

    def _describe_fault(self, error: BaseException) -> tuple[str, int]:
        """Return a description of the error, and the exit code for the other ranks; 0 asks them to report stacks."""
        if isinstance(error, KeyboardInterrupt):
            return "was interrupted (Ctrl-C)", EXIT_INTERRUPTED
        if memory := out_of_memory(error):
            return f"{memory} {self._describe_current()}; {self.advice}", 1
        words = shortened(strip_cpp_stacks(error_text(error)).strip(), MAX_MESSAGE_CHARS)
        return f"raised {type(error).__name__}: {words}", 0

    def _poll(self) -> Iterator[Activity | None]:
        """Yield the current activity a few times a second, while this watchdog is active and its engine exists."""
        while self._describe() is not None and not self._stopped.wait(POLL_SECONDS):
            if Watchdog.latest is self:
                yield self._activity

    def _watch_faults(self) -> None:
        """End this rank, with a report, if a rank has announced a fault or an activity takes too long."""
        board = self._board
        rank = name_this_rank(board.rank)
        # In a large run, ranks take turns to ask the store: with poll_ticks = 3, rank 1 in its third poll, rank 2 in
        # its second, rank 3 in its first, and each again three polls later.
        for tick, activity in enumerate(self._poll(), board.rank):
            is_late = activity is not None and time.monotonic() - activity.since > self.timeout
            is_own_turn = tick % board.poll_ticks == 0
            if not is_own_turn and not is_late:
                continue
            try:
                fault = board.has_fault()
            except Exception:
                if activity is not None:  # a rank without activity may simply be exiting
                    self.exit_with_stack(f"{rank} lost the connection to the {describe_store()}")
                return
            self._answered = time.monotonic()
            if is_late:
                board.announce(f"{rank} exceeded the {board.name}'s timeout: {self.timeout:g} s in one operation")
            if (is_late or fault) and self._exit_lock.acquire(blocking=False):
                flush_and_exit(self._report(self._stack()) or 1)  # 1 if the fault has no exit code

    def _watch_board(self) -> None:
        """End this rank if the store does not answer and the current activity exceeds the timeout."""
        for activity in self._poll():
            now = time.monotonic()
            # In a large run, a rank asks the store less often, so the last answer may be up to `delay` seconds older.
            silence = SILENCE_SECONDS + 4 * self._board.delay
            is_silent = now - self._answered > silence
            if is_silent and activity is not None and now - activity.since > self.timeout + silence:
                self.exit_with_stack(
                    f"{name_this_rank(self._board.rank)}, {self._describe_current()}, for {now - activity.since:.1f} "
                    f"s; the {describe_store()} does not answer: it is dead or stopped"
                )

    def _stop(self) -> None:
        """Stop the threads before the interpreter exits. A thread inside C++ code would crash the process at exit."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2.0)

    def _describe_current(self) -> str:
        """Describe what this rank is doing now."""
        activity = self._activity
        describe = self._describe()
        return self._idle if activity is None or describe is None else describe(activity.what)

    def _extra_lines(self) -> list[str]:
        """Describe the device's progress and pending collectives; ignore errors, so that the report is printed."""
        lines = []
        if self._device_progress:
            with contextlib.suppress(Exception):
                finished = self._device_progress.last_finished()
                if finished:
                    lines.append(f"its device has finished: {finished}")
            with contextlib.suppress(Exception):
                shortage = allocation_retries(self._device_progress.device)
                if shortage:
                    lines.append(shortage)
        with contextlib.suppress(Exception):
            lines += [f"begun and not ended: {words}" for words in pending_collectives()]
        return lines

    def _stack(self) -> str:
        """Return the stack of the main thread as text."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame else "no stack"

    def _report(self, stack: str) -> int:
        """Write this rank's report, and return the announced exit code."""
        what = self._describe_current()
        activity = self._activity
        seconds = time.monotonic() - activity.since if activity else 0.0
        try:
            return self._board.report({"what": what, "since": seconds, "stack": stack, "more": self._extra_lines()})
        except Exception:
            self.exit_with_stack(
                f"{name_this_rank(self._board.rank)}: {what} for {seconds:.1f} s; rank 0 does not answer", stack
            )
        return 0  # not reached, as `exit_with_stack` ends the process

    def exit_with_stack(self, why: str, stack: str = "") -> None:
        """Print why this rank ends, and a stack, by default that of the main thread; end the process with code 1."""
        exit_with_error("\n".join([f"{self._board.name} stopped: {why}", stack or self._stack()]))


def watch_startup() -> None:
    """Make an uncaught error in this process end all ranks with a report, until an engine starts its own watchdog."""
    if not dist.is_initialized() or dist.get_backend() == "fake":  # a simulated world has no other processes
        return
    if dist.get_world_size() > 1 and Watchdog.latest is None:
        watchdog = Watchdog(float("inf"), describe=None, name="run", idle="before its first step in an engine")
        watchdog.reports_all_errors = True

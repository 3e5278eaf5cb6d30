"""Recorder of this rank's timeline, kept in memory until it is written as a Chrome trace (for Perfetto).

A span is a tuple of two clock readings and its description. Recording one costs a few hundred nanoseconds, so a
recorder can stay on. On an accelerator, device events replace the clock, so recording never synchronizes the device.
On a CPU, the thread's CPU time is recorded too: unlike wall-clock time, it does not grow if ranks share cores.
align.py compares the clocks of the ranks; timeline.py reads the files.
"""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ._torch import timed_event
from .messages import say
from .observers import Observer, What, everywhere
from .progress import COMPUTING
from .timeline import names, write_events

LAST = 50  # number of recorded iterations that are kept by default
EVERY = 50  # iterations between two writes of the file
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "barrier",
    "all_to_all_single",
    "reduce",
)


class Mark(NamedTuple):
    """The start of a span: host time (ns) or device event, and the thread's CPU time (ns; 0 on an accelerator)."""

    at: Any
    thread: int


class Piece(NamedTuple):
    """One recorded span.

    kind: "pass", "message", "collective", "step", or "part" for any other part of a step.
    micro: the micro-batch, or -1 if the span belongs to none.
    """

    begin: Any
    end: Any
    work: int  # ns of CPU time of this thread; -1 on an accelerator
    name: str
    kind: str
    micro: int
    chunk: int
    size: int  # bytes sent


STEPS = {"train_batch", "eval_batch"}


class _Spans(Observer):
    """Observer of all engines, which records their instructions and parts of steps while a recorder is active."""

    def __init__(self) -> None:
        self._marks: dict[What, Mark | None] = {}

    def begin(self, what: What) -> None:
        self._marks[what] = begin()

    def end(self, what: What) -> None:
        mark = self._marks.pop(what)
        if isinstance(what, str):
            end(mark, what, "step" if what in STEPS else "part")
        else:
            name = type(what).__name__
            end(mark, name, "pass" if name in COMPUTING else "message", *what.at)


class Tracer:
    """The recorder of one rank.

    about: metadata for readers (rank, stage, ...). first, last: range of iterations to record; by default, the
    newest 50 iterations are kept.
    """

    def __init__(
        self,
        device: torch.device,
        path: Path,
        about: Mapping[str, Any],
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        self.path = path
        self.about = dict(about)
        self.clock: list[tuple[int, float, float]] = []
        self._on_cpu = device.type == "cpu"
        self._device = device
        self._first = first
        self._last = last
        self._kept: deque[tuple[int, list[Piece]]] = deque(maxlen=LAST if last is None else None)
        self._now = list[Piece]()
        self._since_write = 0
        self.size = 0
        # Also record what comes before the first iteration: loading a checkpoint, opening data.
        self.on = first is None
        self._zero = None if self._on_cpu else self._meet_device()

    def _meet_device(self) -> tuple[Any, int]:
        """Return a device event, recorded now, and the host time in ns at which the device finished it."""
        torch.accelerator.synchronize(self._device)
        event = timed_event(self._device)
        torch.accelerator.synchronize(self._device)
        return event, time.perf_counter_ns()

    def iteration(self, number: int) -> None:
        """Begin iteration `number`: record it if it is in the range, and write the file from time to time."""
        has_spans = bool(self._now)
        self._since_write += has_spans
        self.on = self._first is None or self._last is None or self._first <= number <= self._last
        ends = has_spans and not self.on
        if ends or self._since_write >= EVERY:
            self.try_to_write()
        self._now = []
        if self.on:
            self._kept.append((number, self._now))

    def forget(self) -> None:
        """Drop all recorded spans."""
        self._kept.clear()

    def begin(self) -> Mark | None:
        """Start a span and return its mark, or None while recording is off."""
        if not self.on:
            return None
        if self._on_cpu:
            return Mark(time.perf_counter_ns(), time.thread_time_ns())
        return Mark(timed_event(self._device), 0)

    def end(self, mark: Mark | None, name: str, kind: str, micro: int = -1, chunk: int = 0) -> None:
        """End a span. mark: the result of `begin`."""
        if mark is None:
            return
        size = 0
        if kind == "message":
            size = self.size
            self.size = 0
        now: Any
        if self._on_cpu:
            now = time.perf_counter_ns()
            work = time.thread_time_ns() - mark.thread
        else:
            now = timed_event(self._device)
            work = -1
        self._now.append(Piece(mark.at, now, work, name, kind, micro, chunk, size))

    def pieces(self, wait: bool = True) -> list[tuple[int, list[Piece]]]:
        """Return (iteration, its spans) pairs, with host times in ns.

        wait: wait for an accelerator to finish all spans; if False, omit unfinished ones.
        """
        for _, pieces in self._kept:
            if not wait:
                pieces[:] = [each for each in pieces if isinstance(each.end, int) or each.end.query()]
            pieces[:] = map(self._settled, pieces)
        if self._zero is not None and wait:
            # Renew the reference event: times between events are 32-bit floats, which are precise only for short times.
            self._zero = self._meet_device()
        return list(self._kept)

    def _settled(self, piece: Piece) -> Piece:
        if isinstance(piece.begin, int) or self._zero is None:
            return piece
        event, zero = self._zero
        piece.end.synchronize()
        begin = zero + int(event.elapsed_time(piece.begin) * 1e6)
        return piece._replace(begin=begin, end=begin + int(piece.begin.elapsed_time(piece.end) * 1e6))

    def try_to_write(self, wait: bool = True) -> None:
        """Call `write`, but only warn if the timeline cannot be written."""
        try:
            self.write(wait)
        except (OSError, RuntimeError, MemoryError) as error:
            say(f"warning: the timeline {self.path} cannot be written: {error}", error=True)

    def write(self, wait: bool = True) -> None:
        """Write the file of this rank atomically. wait: wait for the device; otherwise unfinished spans are omitted."""
        self._since_write = 0
        rank = self.about.get("rank", 0)
        name = self.about.get("name", f"rank {rank}")
        events = names(rank, name)
        for number, pieces in self.pieces(wait):
            events += [_event(each, rank, number) for each in pieces]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_events(self.path, events, otherData={**self.about, "clock": self.clock})


TRACKS = {"step": 0, "part": 1, "pass": 2, "message": 2, "collective": 3}  # kind of span -> row in Perfetto


def _event(piece: Piece, rank: int, iteration: int) -> dict[str, Any]:
    """Return a complete event of the Trace Event Format, with times in microseconds."""
    args: dict[str, Any] = {"iteration": iteration}
    if piece.micro >= 0:
        args["micro"] = piece.micro
        args["chunk"] = piece.chunk
    if piece.size:
        args["bytes"] = piece.size
    found = {"ph": "X", "name": piece.name, "cat": piece.kind, "pid": rank, "tid": TRACKS[piece.kind]}
    found |= {"ts": piece.begin / 1e3, "dur": (piece.end - piece.begin) / 1e3, "args": args}
    if piece.work >= 0:
        found["tdur"] = piece.work / 1e3
    return found


# ------------------------------------------------------------------ the recorder of this process

_on: list[Tracer] = []  # the active recorder, if any
_spans = _Spans()


def current() -> Tracer | None:
    """Return the active recorder, or None."""
    return _on[0] if _on else None


def begin() -> Mark | None:
    """Start a span and return its mark, or None if there is no active recorder."""
    return _on[0].begin() if _on else None


def end(mark: Mark | None, name: str, kind: str = "part", micro: int = -1, chunk: int = 0) -> None:
    """End a span. mark: the result of `begin`."""
    if mark is not None and _on:
        _on[0].end(mark, name, kind, micro, chunk)


@contextmanager
def span(name: str, kind: str = "part") -> Iterator[None]:
    """Record this block as a span with the given name and kind."""
    mark = begin()
    yield
    end(mark, name, kind)


def sent(size: int) -> None:
    """Count `size` sent bytes; the span of kind "message" that ends next records the total."""
    if _on and _on[0].on:
        _on[0].size += size


def start(tracer: Tracer) -> None:
    """Record with `tracer` until `stop`, including the collectives of torch.distributed."""
    stop()
    for name in COLLECTIVES:
        setattr(dist, name, _noted(name, getattr(dist, name)))
    _on.append(tracer)
    everywhere.append(_spans)


def stop() -> None:
    """Stop recording."""
    _on.clear()
    if _spans in everywhere:
        everywhere.remove(_spans)
    for name in COLLECTIVES:
        setattr(dist, name, getattr(getattr(dist, name), "untraced", getattr(dist, name)))


def _noted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that each call is recorded as a span; for an asynchronous call, this is only the launch."""

    @functools.wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:
        mark = None if torch.compiler.is_compiling() else begin()
        if mark is None:
            return collective(*args, **kwargs)
        found = collective(*args, **kwargs)
        end(mark, f"{name}, begun" if kwargs.get("async_op") else name, "collective")
        return found

    noted.untraced = collective  # type: ignore[attr-defined]
    return noted

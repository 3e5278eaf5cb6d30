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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ._torch import timed_event
from .messages import say
from .observers import Observer, What, process_observers
from .progress import COMPUTE_NAMES
from .timeline import name_events, write_events

KEPT_ITERATIONS = 50  # number of recorded iterations that are kept by default
WRITE_INTERVAL = 50  # iterations between two writes of the file
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "barrier",
    "all_to_all_single",
    "reduce",
]
if hasattr(dist, "all_gather_single"):  # since torch 2.13
    COLLECTIVES += ["all_gather_single", "reduce_scatter_single"]


class SpanStart(NamedTuple):
    """The start of a span: host time (ns) or device event, and the thread's CPU time (ns; 0 on an accelerator)."""

    time: Any
    thread_ns: int


class RecordedSpan(NamedTuple):
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


STEP_NAMES = {"train_batch", "eval_batch"}


class _SpanObserver(Observer):
    """Observer of all engines, which records their instructions and parts of steps while a recorder is active."""

    def __init__(self) -> None:
        self._marks: dict[What, SpanStart | None] = {}

    def begin(self, what: What) -> None:
        self._marks[what] = begin()

    def end(self, what: What) -> None:
        mark = self._marks.pop(what)
        if isinstance(what, str):
            kind = "step" if what in STEP_NAMES else "part"
            end(mark, what, kind)
        else:
            name = type(what).__name__
            kind = "pass" if name in COMPUTE_NAMES else "message"
            end(mark, name, kind, *what.micro_chunk)


@dataclass
class Tracer:
    """The recorder of one rank.

    metadata: for readers (rank, stage, ...). wanted: iterations to record; by default, the newest 50 iterations are
    kept.
    """

    device: torch.device
    path: Path
    metadata: Mapping[str, Any]
    wanted: range | None = None

    def __post_init__(self) -> None:
        self.clock: list[tuple[int, float, float]] = []
        self._on_cpu = self.device.type == "cpu"
        # The recorded iterations and their spans; without a range, only the newest.
        max_iterations = KEPT_ITERATIONS if self.wanted is None else None
        self._iterations: deque[tuple[int, list[RecordedSpan]]] = deque(maxlen=max_iterations)
        self._current_spans = list[RecordedSpan]()
        self._since_write = 0  # recorded iterations since the file was written
        self.size = 0  # bytes sent since the last message ended
        self.is_recording = False  # until the first iteration
        self._reference: tuple[Any, int] | None = None  # on an accelerator, set when recording begins

    def _record_reference(self) -> tuple[Any, int]:
        """Return a device event, recorded now, and the host time in ns at which the device finished it."""
        torch.accelerator.synchronize(self.device)
        event = timed_event(self.device)
        torch.accelerator.synchronize(self.device)
        return event, time.perf_counter_ns()

    def iteration(self, number: int) -> None:
        """Begin iteration `number`: record it if it is in the range, and write the file from time to time."""
        was_recording = self.is_recording
        has_spans = bool(self._current_spans)  # whether the previous iteration was recorded
        self._since_write += has_spans
        # Without a range, each iteration is recorded, and `_iterations` drops the oldest ones.
        self.is_recording = self.wanted is None or number in self.wanted
        range_has_ended = has_spans and not self.is_recording
        if range_has_ended or self._since_write >= WRITE_INTERVAL:
            self.try_to_write()
        self._current_spans = []
        if self.is_recording:
            if not (was_recording or self._on_cpu):
                self._reference = self._record_reference()  # of now, as `spans` needs short times
            self._iterations.append((number, self._current_spans))  # `end` appends to this list

    def begin(self) -> SpanStart | None:
        """Start a span and return its mark, or None while recording is off."""
        if not self.is_recording:
            return None
        if self._on_cpu:
            return SpanStart(time.perf_counter_ns(), time.thread_time_ns())
        return SpanStart(timed_event(self.device), 0)

    def end(self, mark: SpanStart | None, name: str, kind: str, micro: int = -1, chunk: int = 0) -> None:
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
            work = time.thread_time_ns() - mark.thread_ns
        else:
            now = timed_event(self.device)
            work = -1
        self._current_spans.append(RecordedSpan(mark.time, now, work, name, kind, micro, chunk, size))

    def spans(self, wait: bool = True) -> list[tuple[int, list[RecordedSpan]]]:
        """Return (iteration, its spans) pairs, with host times in ns.

        wait: wait for an accelerator to finish all spans; if False, omit unfinished ones.
        """
        # Change the recorded lists themselves, so that each span is converted once and its events are freed.
        for _, spans in self._iterations:
            if not wait:  # a host time is an int; a device event says whether the device has reached it
                spans[:] = [each for each in spans if isinstance(each.end, int) or each.end.query()]
            spans[:] = map(self._to_host_times, spans)
        if self._reference is not None and wait:
            # Renew the reference event: times between events are 32-bit floats, which are precise only for short times.
            self._reference = self._record_reference()
        return list(self._iterations)

    def _to_host_times(self, span: RecordedSpan) -> RecordedSpan:
        """Return a span with its device events replaced by host times in ns, after waiting for its end."""
        if isinstance(span.begin, int) or self._reference is None:  # these are host times already
            return span
        event, reference_ns = self._reference
        span.end.synchronize()
        begin = reference_ns + int(event.elapsed_time(span.begin) * 1e6)  # convert ms to ns
        return span._replace(begin=begin, end=begin + int(span.begin.elapsed_time(span.end) * 1e6))

    def try_to_write(self, wait: bool = True) -> None:
        """Call `write`, but only warn if the timeline cannot be written."""
        try:
            self.write(wait)
        except (OSError, RuntimeError, MemoryError) as error:
            say(f"warning: the timeline {self.path} cannot be written: {error}", error=True)

    def write(self, wait: bool = True) -> None:
        """Write the file of this rank atomically. wait: wait for the device; otherwise unfinished spans are omitted."""
        self._since_write = 0
        metadata = self.metadata
        rank = metadata.get("rank", 0)
        name = metadata.get("name", f"rank {rank}")
        events = name_events(rank, name)
        for iteration, spans in self.spans(wait):
            events += [_event(each, rank, iteration) for each in spans]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_events(self.path, events, otherData={**metadata, "clock": self.clock})


TRACKS = {"step": 0, "part": 1, "pass": 2, "message": 2, "collective": 3}  # kind of span -> row in Perfetto


def _event(span: RecordedSpan, rank: int, iteration: int) -> dict[str, Any]:
    """Return a complete event of the Trace Event Format, with times in microseconds."""
    args: dict[str, Any] = {"iteration": iteration}
    if span.micro >= 0:
        args["micro"] = span.micro
        args["chunk"] = span.chunk
    if span.size:
        args["bytes"] = span.size
    event = {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": rank,
        "tid": TRACKS[span.kind],
        "ts": span.begin / 1e3,
        "dur": (span.end - span.begin) / 1e3,
        "args": args,
    }
    if span.work >= 0:
        event["tdur"] = span.work / 1e3
    return event


# ------------------------------------------------------------------ the recorder of this process

_active: list[Tracer] = []  # the active recorder, if any
_span_observer = _SpanObserver()


def begin() -> SpanStart | None:
    """Start a span and return its mark, or None if there is no active recorder."""
    return _active[0].begin() if _active else None


def end(mark: SpanStart | None, name: str, kind: str = "part", micro: int = -1, chunk: int = 0) -> None:
    """End a span. mark: the result of `begin`."""
    if _active:
        _active[0].end(mark, name, kind, micro, chunk)


@contextmanager
def span(name: str, kind: str = "part") -> Iterator[None]:
    """Record this block as a span with the given name and kind."""
    mark = begin()
    yield
    end(mark, name, kind)


def sent(size: int) -> None:
    """Count `size` sent bytes; the span of kind "message" that ends next records the total."""
    if _active and _active[0].is_recording:
        _active[0].size += size


def start(tracer: Tracer) -> None:
    """Record with `tracer` until `stop`, including the collectives of torch.distributed."""
    stop()
    for name in COLLECTIVES:
        setattr(dist, name, _traced(name, getattr(dist, name)))
    _active.append(tracer)
    process_observers.append(_span_observer)


def stop() -> None:
    """Stop recording."""
    _active.clear()
    if _span_observer in process_observers:
        process_observers.remove(_span_observer)
    for name in COLLECTIVES:
        collective = getattr(dist, name)
        setattr(dist, name, getattr(collective, "untraced", collective))


def _traced(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective so that each call is recorded as a span; for an asynchronous call, this is only the launch."""

    @functools.wraps(collective)
    def traced(*args: Any, **kwargs: Any) -> Any:
        mark = None if torch.compiler.is_compiling() else begin()  # torch.compile cannot trace the recorder
        result = collective(*args, **kwargs)
        if mark is not None:
            span_name = f"{name}, begun" if kwargs.get("async_op") else name
            end(mark, span_name, "collective")
        return result

    traced.untraced = collective  # type: ignore[attr-defined]
    return traced

"""Timers of named parts of a step."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from tds import trace

from .ranks.rank_0 import print_rank_0


class Timer:
    """Timer of one named part of a step: `with timer: ...`, or `timer.start()` and `timer.stop()`.

    Raises RuntimeError if the timer is started twice or stopped without a start.
    device: accelerator whose time is measured with events; None measures the time of the host.
    """

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name = name
        self._device = device
        self._started_at: Any = None
        self._trace_mark: trace.SpanStart | None = None
        self.reset()

    def _now(self) -> Any:
        """Return the seconds of the host, or an event of the device."""
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start measuring."""
        if self._started_at is not None:
            raise RuntimeError(f"the timer {self.name!r} runs already; stop() it before it starts again")
        self._started_at = self._now()
        self._trace_mark = trace.begin()

    def stop(self) -> None:
        """Stop measuring."""
        if self._started_at is None:
            raise RuntimeError(f"the timer {self.name!r} is not running: call start() before stop()")
        self._intervals.append((self._started_at, self._now()))
        trace.end(self._trace_mark, self.name)
        self._started_at = None
        self.used = True
        if self._device is None:
            self._accumulate()  # events would have to be waited for, so they are read only in elapsed()

    def _accumulate(self) -> None:
        """Add the stored intervals to the measured seconds, and forget them. Waits for the events of a device."""
        for begun, ended in self._intervals:
            if self._device is None:
                self._seconds += ended - begun
            else:
                ended.synchronize()
                self._seconds += begun.elapsed_time(ended) / 1e3  # from milliseconds
        self._intervals.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds measured since the last reset. A timer that runs continues to run."""
        was_running = self._started_at is not None
        if was_running:
            self.stop()
        # On an accelerator, stop() has only stored the events of the intervals. This waits for them and sums the times.
        self._accumulate()
        seconds = self._seconds
        if reset:
            self.reset()
        if was_running:
            self.start()
        return seconds

    def reset(self) -> None:
        """Discard the measured time and stop the timer."""
        self._started_at = None
        self._seconds = 0.0
        self.used = False
        self._intervals: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Timers:
    """Timers of named parts of a step: `with timers("forward"): ...`, or `timers("forward").start()` and `.stop()`.

    device: the device whose time is measured. Accelerators run asynchronously, so a timer records events on the
    accelerator. The host waits for these events only when it reads the times.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type != "cpu" else None
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        if name not in self._timers:
            self._timers[name] = Timer(name, self._device)
        return self._timers[name]

    def take(self) -> dict[str, float]:
        """Return name -> seconds since the last call, for each part that was measured."""
        return {name: timer.elapsed() for name, timer in self._timers.items() if timer.used}

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> None:
        """Print a line on rank 0 with the milliseconds of the parts `names`, each divided by `normalizer`."""
        spent = {name: self(name).elapsed(reset) * 1e3 / normalizer for name in names}
        print_rank_0("time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in spent.items()))

"""The progress line every few steps, and the time spent in each part of a step."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from . import trace
from ._torch import timed_event

MOST_TIMED = 1000  # maximum number of steps in DeepSpeed's timer, which keeps two device events for each
COMPUTING = ("Forward", "Backward", "BackwardInput", "BackwardWeight")


class Progress:
    """Timer of the parts of a step; it also makes the progress lines.

    every: steps between two lines; None: no lines.
    breakdown: whether to measure the time of each kind of instruction.

    On a CPU, `busy` is the time of computation in seconds, including waits for tensor-parallel ranks but not for other
    stages. The caller sets it to 0 to start a new measurement.
    """

    def __init__(self, device: torch.device, every: int | None, breakdown: bool) -> None:
        self.device = device
        self.every = every
        self.breakdown = breakdown
        self._seconds: dict[str, float] = defaultdict(float)  # by kind of instruction, since the last progress line
        self._since = time.perf_counter()
        self._on_cpu = device.type == "cpu"
        self._noted: deque[tuple[str, torch.Event, torch.Event]] = deque()  # device events that are not accumulated yet
        self.busy = 0.0
        self._mark: trace.Mark | None = None  # start of the current span, while a timeline is recorded

    def begin(self, what: str) -> "float | torch.Event | None":
        """Return the start time of an instruction, or None if it is not measured."""
        self._mark = trace.begin()
        if not self.breakdown and not (self._on_cpu and what in COMPUTING):
            return None
        return self._now()

    def _now(self) -> "float | torch.Event":
        """Return the current time, or a device event on an accelerator.

        Reading the clock of an accelerator would need a synchronization. Within a step, this would also wait for posted
        messages and might deadlock.
        """
        if self._on_cpu:
            return time.perf_counter()
        return timed_event(self.device)

    def end(self, what: str, begun: "float | torch.Event | None", at: tuple[int, int] = (-1, 0)) -> None:
        """Record the end of an instruction. begun: what `begin` returned. at: micro-batch and chunk, if any."""
        if self._mark is not None:
            kind = "part" if at[0] < 0 else "pass" if what in COMPUTING else "message"
            trace.end(self._mark, what, kind, *at)
        if begun is None:
            return
        if not isinstance(begun, float):
            self._noted.append((what, begun, self._now()))  # type: ignore[arg-type]
            return
        took = time.perf_counter() - begun
        if what in COMPUTING:
            self.busy += took
        if self.breakdown:
            self._seconds[what] += took

    def _add_up(self, wait: bool) -> None:
        """Accumulate the times of recorded device events. wait: also wait for events that are still pending."""
        while self._noted and (wait or self._noted[0][2].query()):
            what, begun, ended = self._noted.popleft()
            ended.synchronize()
            self._seconds[what] += begun.elapsed_time(ended) / 1e3

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Time this block as the part `what` of a step."""
        begun = self.begin(what)
        yield
        self.end(what, begun)

    def step(self, steps: int, samples: int, losses: Mapping[str, Tensor]) -> str | None:
        """Return the progress line after every `every` steps, else None.

        steps: optimizer steps so far. samples: samples in each step.
        """
        self._add_up(wait=False)
        if not self.every or steps % self.every:
            return None
        took = (time.perf_counter() - self._since) / self.every
        named = " ".join(f"{name}: {value.item():.4f}" for name, value in losses.items())
        line = f"steps: {steps} {named} iter time (s): {took:.3f} samples/sec: {samples / took:.3f}"
        if seconds := self.take():
            spent = " | ".join(f"{name}: {1e3 * s / self.every:.2f}" for name, s in seconds.items())
            line += f"\ntime (ms) of rank 0 in a step | {spent}"
        self._since = time.perf_counter()
        return line

    def take(self) -> dict[str, float]:
        """Return the measured seconds of each kind of instruction since the last call. Call between two steps."""
        self._add_up(wait=True)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

"""The progress line every few steps, the time spent in each part of a step, and the losses for DeepSpeed's monitors."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._torch import timed_event
from .observers import Observer, What

MAX_TIMED_STEPS = 1000  # maximum number of steps in DeepSpeed's timer, which keeps two device events for each
TIMED_PARTS = ("Reduce", "Step")  # measured parts of a step besides the instructions
COMPUTE_NAMES = ("Forward", "Backward", "BackwardInput", "BackwardWeight")


@dataclass
class Progress(Observer):
    """Timer of the parts of a step; it also makes the progress lines.

    every: steps between two lines; None: no lines.
    breakdown: whether to measure the time of each kind of instruction.

    On a CPU, `busy` is the time of computation in seconds, including waits for tensor-parallel ranks but not for other
    stages. The caller sets it to 0 to start a new measurement.
    """

    device: torch.device
    every: int | None
    breakdown: bool

    def __post_init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)  # by kind of instruction, since the last progress line
        self._is_training = True  # False in an evaluation, whose instructions are not measured
        self._step_began_at = 0.0
        self._step_seconds = 0.0  # spent in steps since the last line, as `_steps` and `_samples`
        self._steps = 0
        self._samples = 0
        self._on_cpu = self.device.type == "cpu"
        self._event_pairs: deque[tuple[str, torch.Event, torch.Event]] = deque()  # not accumulated yet
        self.busy = 0.0
        self._start: Any = 0.0  # start of the measured instruction or part: a time, or a device event

    def begin(self, what: What) -> None:
        """Record the start of a step, or of a measured instruction or part of a step."""
        if what in ("train_batch", "eval_batch"):
            self._is_training = what == "train_batch"
            self._step_began_at = time.perf_counter()
        if self._measured_name(what):
            self._start = self._read_clock()

    def _measured_name(self, what: What) -> str | None:
        """Return the name under which the time of an instruction or part is measured, or None if it is not."""
        if isinstance(what, str):
            name = what
            is_measured = self.breakdown and name in TIMED_PARTS
        else:
            name = type(what).__name__
            # On a CPU, `busy` needs the times of the passes, even without a breakdown.
            is_measured = self.breakdown or (self._on_cpu and name in COMPUTE_NAMES)
        return name if is_measured and self._is_training else None

    def _read_clock(self) -> "float | torch.Event":
        """Return the current time, or a device event on an accelerator.

        Reading the clock of an accelerator would need a synchronization. Within a step, this would also wait for posted
        messages and might deadlock.
        """
        if self._on_cpu:
            return time.perf_counter()
        return timed_event(self.device)

    def end(self, what: What) -> None:
        """Record the end of a step, or of a measured instruction or part of a step."""
        if what == "train_batch":
            self._step_seconds += time.perf_counter() - self._step_began_at
        name = self._measured_name(what)
        if name is None:
            return
        ended: Any = self._read_clock()
        if self._on_cpu:  # two times in seconds; on an accelerator, two events whose distance is read later
            elapsed = ended - self._start
            if name in COMPUTE_NAMES:
                self.busy += elapsed
            if self.breakdown:
                self._seconds[name] += elapsed
        else:
            self._event_pairs.append((name, self._start, ended))

    def _accumulate_events(self, wait: bool) -> None:
        """Accumulate the times of recorded device events. wait: also wait for events that are still pending."""
        while self._event_pairs:
            name, started, ended = self._event_pairs[0]  # the oldest pair
            if not wait and not ended.query():
                return
            ended.synchronize()
            self._seconds[name] += started.elapsed_time(ended) / 1e3  # it is in ms
            self._event_pairs.popleft()

    def step(self, steps: int, samples: int, losses: Mapping[str, Tensor]) -> str | None:
        """Return the progress line after every `every` steps, else None.

        steps: optimizer steps so far. samples: samples in this step.
        """
        self._accumulate_events(wait=False)
        self._steps += 1
        self._samples += samples
        if not self.every or steps % self.every:
            return None
        loss_texts = [f"{name}: {value.item():.4f}" for name, value in losses.items()]
        line = f"steps: {steps} {' '.join(loss_texts)} iter time (s): {self._step_seconds / self._steps:.3f} "
        line += f"samples/sec: {self._samples / self._step_seconds:.3f}"
        # take() also synchronizes and forgets the measured times. It is empty without `breakdown`.
        part_texts = [f"{name}: {1e3 * spent / self._steps:.2f}" for name, spent in self.take().items()]
        if part_texts:
            line += f"\ntime (ms) of rank 0 in a step | {' | '.join(part_texts)}"
        self._step_seconds = 0.0
        self._steps = 0
        self._samples = 0
        return line

    def take(self) -> dict[str, float]:
        """Return the measured seconds of each kind of instruction since the last call. Call between two steps."""
        self._accumulate_events(wait=True)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


def report_losses(engine: Any, name: str, loss: Tensor) -> None:
    """Write the loss, and the losses by name if there are several, to DeepSpeed's monitors.

    engine: a PipelineEngine. name: of the total loss, "train_loss" or "eval_loss". For example, the losses "lm" and
    "router" are then written as "lm" and "router" in training, as "eval_lm" and "eval_router" in an evaluation.
    """
    if engine.global_rank != 0 or not engine.monitor.enabled:
        return
    losses = {name: loss}
    prefix = "eval_" if name == "eval_loss" else ""
    if len(engine._losses.all_means) > 1:
        for key, value in engine._losses.all_means.items():
            losses.setdefault(prefix + key, value)  # a loss with the name of the total does not replace it
    events = []
    for key, value in losses.items():
        events.append((f"Train/Samples/{key}", value.item(), engine.global_samples))
    engine.monitor.write_events(events)

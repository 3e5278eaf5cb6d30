"""Measurements of a run: timers, number of floating-point operations, and the file `metrics.jsonl`."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tqdm import tqdm

from tds import trace

from ..atomic import append_whole, write_text
from ..config import Config
from ..model.work import block_work, idle_weights
from ..rows import RowError, row_of


class Timer:
    """Timer of one named part of a step: `with timer: ...`, or `timer.start()` and `timer.stop()`.

    Raises RuntimeError if the timer is started twice or stopped without a start.
    device: accelerator whose time is measured with events; None measures the time of the host.
    """

    def __init__(self, name: str, device: torch.device | None) -> None:
        self.name = name
        self._device = device
        self._begun: float | torch.Event | None = None
        self._mark: trace.Mark | None = None
        self.reset()

    def _now(self) -> float | torch.Event:
        if self._device is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start measuring."""
        if self._begun is not None:
            raise RuntimeError(f"the timer {self.name!r} runs already; stop() it before it starts again")
        self._begun, self._mark = self._now(), trace.begin()

    def stop(self) -> None:
        """Stop measuring."""
        if self._begun is None:
            raise RuntimeError(f"the timer {self.name!r} is not running: call start() before stop()")
        self._marks.append((self._begun, self._now()))
        trace.end(self._mark, self.name)
        self._begun = None
        self.used = True
        if self._device is None:
            self._add_up()

    def _add_up(self) -> None:
        for begun, ended in self._marks:
            if isinstance(begun, float) and isinstance(ended, float):
                self._spent += ended - begun
            else:
                ended.synchronize()  # type: ignore[union-attr]
                self._spent += begun.elapsed_time(ended) / 1e3  # type: ignore[union-attr,arg-type]
        self._marks.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Return the seconds measured since the last reset. A timer that runs continues to run."""
        runs = self._begun is not None
        if runs:
            self.stop()
        self._add_up()
        spent = self._spent
        if reset:
            self.reset()
        if runs:
            self.start()
        return spent

    def reset(self) -> None:
        """Discard the measured time and stop the timer."""
        self._begun = None
        self._spent = 0.0
        self.used = False
        self._marks: list[tuple[float | torch.Event, float | torch.Event]] = []

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
        if not dist.is_initialized() or dist.get_rank() == 0:
            tqdm.write("time (ms)" + "".join(f" | {name}: {ms:.2f}" for name, ms in spent.items()))


def flops_per_token(parameters: int, config: Config, encoder: int, decoder: int = 0) -> float:
    """Return the FLOPs of a training step per token, for samples of `encoder` (+ `decoder`) tokens.

    Each parameter that multiplies a token counts 6 FLOPs (2 forward, 4 backward; Kaplan et al. 2020). The attention
    matmuls count in addition, without savings by the causal mask (Chowdhery et al. 2022). Embedding look-ups count 0.
    GPT-2 and Llama: 6 N + 12 x layers x sequence length x heads x head size. N is the number of parameters without
    position embeddings, without an untied word embedding, and of each mixture with only its router, the experts of a
    token and the shared experts. A tied word embedding counts as the output layer.
    T5: encoder tokens pass through the encoder layers and the key and value projections of cross-attention. Decoder
    tokens pass through all other matmuls.
    """
    m = config.model
    if not decoder:
        inner = m.num_attention_heads * m.head_size
        looked_up = config.positions if m.position_embedding == "learned" else 0
        looked_up += 0 if m.tie_embeddings else m.vocab_size or 0
        multiplied = parameters - looked_up * m.hidden_size - idle_weights(m)
        return 6.0 * multiplied + 12.0 * m.num_layers * inner * encoder
    blocks = sum(block_work(m, encoder, i) for i in range(m.num_layers))
    blocks += sum(block_work(m, decoder, i, encoder) for i in range(m.decoder_layers))
    logits = decoder * m.hidden_size * (m.vocab_size or 0)
    return 6.0 * (blocks + logits) / (encoder + decoder)


MOST_WAITING = 100_000  # maximum number of lines kept in memory while metrics.jsonl cannot be written


def _plain(value: Any) -> Any:
    """Return `value` with NaN and infinities replaced by None, as JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Writer(Protocol):
    """Protocol of a writer to one destination of metrics besides metrics.jsonl.

    name: name of the destination in messages. flag: flag of the destination, without dashes.
    """

    name: str
    flag: str

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None: ...

    def write(self, split: str, iteration: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one row.

        split: `train`, `valid` or `test`. numbers: name of a metric -> value.
        """

    def close(self) -> None:
        """Finish writing."""


class MetricsWriter:
    """Writer that appends rows to `metrics.jsonl` and forwards their numbers to other writers.

    iteration: the iteration from which the run resumes. The rows of later iterations are removed from the file, so that
    each iteration occurs once. active: True on rank 0; on other ranks, the writer does nothing.
    """

    def __init__(self, run_dir: str, iteration: int, active: bool) -> None:
        self._path: Path | None = None
        self._others: list[Writer] = []
        self._waiting: list[str] = []  # lines of metrics.jsonl that could not be written yet
        self.withheld = False  # True if the run directory is no longer this run's, so that nothing may be written there
        # Name of a writer -> (split, iteration, numbers) of the rows that it does not have yet.
        self._late: dict[str, list[tuple[str, int, dict[str, Any]]]] = {}
        self._held: set[tuple[str, int]] = set()  # (split, iteration) of each row that was in the file at the start
        if active:
            self._path = Path(run_dir) / "metrics.jsonl"
            self._forget_after(self._path, iteration)

    def forward_to(self, others: Sequence[Writer]) -> None:
        """Let `others` get the numbers of each row that is written from now on."""
        self._others += others

    def holds(self, part: str, iteration: int) -> bool:
        """Return True if metrics.jsonl had a row of the split `part` at `iteration` when this process started.

        Ranks other than 0 always return False.
        """
        return (part, iteration) in self._held

    def _forget_after(self, path: Path, iteration: int) -> None:
        if not path.exists():
            return
        kept = []
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            try:
                row = row_of(line)
            except RowError as error:
                tqdm.write(f"note: {path}, line {number} is invalid and is removed: {error}")
                continue
            if row is not None and row["iteration"] <= iteration:
                kept.append(line + "\n")
                self._held.add((str(row.get("split")), row["iteration"]))
        write_text(path, "".join(kept))

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl; NaN and infinities become null.

        row: numbers, texts, and lists and dicts of numbers and texts.
        If the file cannot be written, e.g. on a full disk, print a note, and write this row together with a later row.
        """
        if self._path is not None:
            self._waiting.append(json.dumps(_plain(row), allow_nan=False) + "\n")
            self._append(self._path)
        numbers = {
            name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "iteration"
        }
        for layer, metrics in row.get("layers", {}).items():
            numbers |= {f"layers/{layer}/{name}": value for name, value in metrics.items() if value is not None}
        for other in list(self._others):
            self._late.setdefault(other.name, []).append((row.get("split", "train"), row["iteration"], numbers))
            self._forward(other)

    def _forward(self, other: Writer) -> None:
        """Give a writer the rows that it does not have yet. It keeps its rows while a disk is full."""
        late = self._late[other.name]
        count = len(late)
        try:
            while late:
                other.write(*late[0])
                del late[0]
        except Exception as error:  # services such as MLflow may raise errors of any class
            if isinstance(error, OSError) and getattr(other, "retries", False):
                if count == 1:
                    tqdm.write(
                        f"note: {other.name} cannot be written ({error.strerror}); its rows are kept until it can"
                    )
                del late[:-MOST_WAITING]
                return
            self._others.remove(other)
            tqdm.write(f"note: {other.name} failed at iteration {late[0][1]}, so it gets no more metrics: {error}")

    def _append(self, path: Path) -> None:
        if self.withheld:
            return
        late = len(self._waiting) > 1
        try:
            append_whole(path, "".join(self._waiting))
        except OSError as error:
            if not late:
                tqdm.write(
                    f"note: {path} cannot be written ({error.strerror}); training continues, and the lines are kept "
                    "in memory until the file can be written"
                )
            del self._waiting[:-MOST_WAITING]
            return
        if late:
            tqdm.write(f"note: {path} can be written again; it now has the {len(self._waiting) - 1} kept lines, too")
        self._waiting.clear()

    def close(self) -> int:
        """Write the rows that could not be written yet, and close the other writers.

        Returns the number of rows that metrics.jsonl lacks.
        """
        if self._path is not None and self._waiting:
            self._append(self._path)
        if self._waiting:
            tqdm.write(f"note: the last {len(self._waiting)} lines of {self._path} were not written")
        for other in list(self._others):
            if self._late.get(other.name):
                self._forward(other)
            if lacks := len(self._late.get(other.name, ())):
                tqdm.write(f"note: the last {lacks} rows of {other.name} were not written")
            try:
                other.close()
            except Exception as error:  # services such as MLflow may raise errors of any class
                tqdm.write(f"note: {other.name} could not be closed: {error}")
        return len(self._waiting)

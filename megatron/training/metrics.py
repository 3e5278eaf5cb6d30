"""The file `metrics.jsonl`, and the forwarding of its rows to other writers."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from ..atomic import append_whole, write_text
from ..config import Config
from ..rows import RowError, row_of

MOST_WAITING = 100_000  # maximum number of lines kept in memory while metrics.jsonl cannot be written


def _plain(value: Any) -> Any:
    """Return `value` with NaN and infinities replaced by None, as JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row, those of layers under names such as layers/LAYER/METRIC; texts by their prompt."""
    numbers = {sample["prompt"]: sample["text"] for sample in row.get("samples", ())}
    for name, value in row.items():
        if isinstance(value, (int, float)) and name != "iteration":
            numbers[name] = value
    for layer, metrics in row.get("layers", {}).items():
        for name, value in metrics.items():
            if value is not None:
                numbers[f"layers/{layer}/{name}"] = value
    return numbers


class Writer(Protocol):
    """Protocol of a writer to one destination of metrics besides metrics.jsonl.

    name: name of the destination in messages. flag: flag of the destination, without dashes. A writer with the
    attribute shows_texts = True also gets the row of samples, as prompt -> text.
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
            if row is not None and row["iteration"] <= iteration and row.get("split") != "end":
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
        numbers = _numbers(row)
        for other in list(self._others):
            if not numbers or "samples" in row and not getattr(other, "shows_texts", False):
                continue
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

    def close(self, error: BaseException | None = None, run: Any = None) -> int:
        """Write the rows that could not be written yet, and close the other writers.

        error: what has ended `run`, a Run; it becomes the last row of metrics.jsonl.
        Returns the number of rows that metrics.jsonl lacks.
        """
        if error is not None:
            from .complaints import end_of

            self.write(end_of(error, run))
        elif self._path is not None and self._waiting:
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

"""The file `metrics.jsonl`, and the forwarding of its rows to other writers."""

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from ..atomic import append_or_restore, atomic_file
from ..config import Config
from ..rows import RowError, parse_row

MAX_WAITING_LINES = 100_000  # maximum number of lines kept in memory while metrics.jsonl cannot be written


def _json_safe(value: Any) -> Any:
    """Return `value` with NaN and infinities replaced by None, as JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _json_safe(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Writer(Protocol):
    """Protocol of a writer to one destination of metrics besides metrics.jsonl.

    name: name of the destination in messages. flag: flag of the destination, without dashes. A writer with the
    attribute shows_texts = True also gets the row of samples, as prompt -> text.
    """

    name: str
    flag: str

    def __init__(self, config: Config, run_dir: Path, iteration: int) -> None: ...

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of one row.

        numbers: split, such as `train`, `valid` or `test`, and name of a metric, such as train/lm_loss -> value.
        """

    def close(self) -> None:
        """Finish writing."""


class MetricsWriter:
    """Writer that appends rows to `metrics.jsonl` and forwards their numbers to other writers.

    iteration: the iteration from which the run resumes. The rows of later iterations are removed from the file, so that
    each iteration occurs once. active: True on rank 0; on other ranks, the writer does nothing.
    """

    def __init__(self, run_dir: str, iteration: int, active: bool) -> None:
        self._path = Path(run_dir) / "metrics.jsonl"
        self._active = active
        self._writers: list[Writer] = []
        self._unwritten: list[str] = []  # lines of metrics.jsonl that could not be written yet
        self.is_paused = False  # True if the run has lost its run directory, in which it may not write then
        # Name of a writer -> (iteration, numbers) of the rows that it does not have yet.
        self._unsent: defaultdict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
        self._rows_at_start: set[tuple[str, int]] = set()  # arguments for which `has_row` returns True
        if active:
            self._drop_later_rows(iteration)

    def forward_to(self, writers: Iterable[Writer]) -> None:
        """Let `writers` get the numbers of each row that is written from now on.

        If an iterator of writers raises an error, `close` closes those that it has yielded.
        """
        for writer in writers:
            self._writers.append(writer)

    def has_row(self, part: str, iteration: int) -> bool:
        """Return True, after a note, if metrics.jsonl had a row of `part` at `iteration` when this process started.

        part: a split, or `samples/PROMPT` for the text of a prompt. Ranks other than 0 always return False.
        """
        is_found = (part, iteration) in self._rows_at_start
        if is_found:
            tqdm.write(
                f"note: {self._path} has the row {part} of iteration {iteration} already; delete it to evaluate again"
            )
        return is_found

    def _drop_later_rows(self, iteration: int) -> None:
        """Rewrite metrics.jsonl without rows that the run will write again, and remember which rows it has."""
        path = self._path
        if not path.exists():
            return
        # Line by line, as the file of a model with many experts may be larger than the memory.
        with (
            atomic_file(path) as temporary_path,
            open(temporary_path, "x", encoding="utf-8") as new_file,
            open(path, encoding="utf-8", errors="replace") as lines,
        ):
            for number, line in enumerate(lines, start=1):
                try:
                    row = parse_row(line)
                except RowError as error:
                    tqdm.write(f"note: {path}, line {number} is invalid and is removed: {error}")
                    continue
                if row is None or row["iteration"] > iteration:  # None: a crash has cut the line off
                    continue
                split = row.get("split")
                if split == "end":  # the previous start wrote this row when it ended, but the run now continues
                    continue
                new_file.write(line.rstrip("\n") + "\n")
                if split != "train":  # `has_row` is asked only for results
                    self._rows_at_start.add((str(split), row["iteration"]))
                for sample in row.get("samples", ()):
                    self._rows_at_start.add((f"samples/{sample['prompt']}", row["iteration"]))
            new_file.flush()
            os.fsync(new_file.fileno())  # before the old file is replaced, since a machine may lose power

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl; NaN and infinities become null.

        row: numbers, texts, and lists and dicts of numbers and texts.
        If the file cannot be written, e.g. on a full disk, print a note, and write this row together with a later row.
        """
        if self._active:
            line = json.dumps(_json_safe(row), allow_nan=False)
            self._unwritten.append(line + "\n")
            self._append_lines()
        # Only the row of samples has texts, which writers get by their prompt. It has no numbers besides its iteration.
        split = row.get("split", "train")
        numbers = {f"{split}/{sample['prompt']}": sample["text"] for sample in row.get("samples", ())}
        for name, value in row.items():
            if isinstance(value, (int, float)) and name != "iteration":
                numbers[f"{split}/{name}"] = value
        for layer, metrics in row.get("layers", {}).items():
            for name, value in metrics.items():
                if value is not None:
                    numbers[f"{split}/layers/{layer}/{name}"] = value
        for writer in list(self._writers):  # a copy, as `_forward` removes a writer that fails
            can_show = "samples" not in row or getattr(writer, "shows_texts", False)
            if numbers and can_show:
                entry = (row["iteration"], numbers)
                self._unsent[writer.name].append(entry)
                self._forward(writer)

    def _forward(self, writer: Writer) -> None:
        """Give a writer the rows that it does not have yet.

        After an OSError, such as that of a full disk, a writer with the attribute retries = True keeps its rows until
        the next call. In all other cases, an error removes the writer, which gets no more rows.
        """
        unsent = self._unsent[writer.name]
        has_kept_rows = len(unsent) > 1  # the last row is new; others were kept when a write failed
        try:
            while unsent:
                writer.write(*unsent[0])  # the iteration and its numbers
                del unsent[0]  # only now, so that an error keeps the row
        except Exception as error:  # services such as MLflow may raise errors of any class
            if isinstance(error, OSError) and getattr(writer, "retries", False):
                if not has_kept_rows:  # the first failure; one note is enough for it and those that follow
                    tqdm.write(
                        f"note: {writer.name} cannot be written ({error.strerror}); its rows are kept until it can"
                    )
                del unsent[:-MAX_WAITING_LINES]  # all but the newest
                return
            self._writers.remove(writer)
            tqdm.write(f"note: {writer.name} failed at iteration {unsent[0][0]}, so it gets no more metrics: {error}")

    def _append_lines(self) -> None:
        """Write all lines that could not be written yet; keep them for the next call if the file cannot be written."""
        path = self._path
        if self.is_paused:
            return
        has_kept_lines = len(self._unwritten) > 1  # the last line is new; others were kept when a write failed
        try:
            append_or_restore(path, "".join(self._unwritten))
        except OSError as error:
            if not has_kept_lines:
                tqdm.write(
                    f"note: {path} cannot be written ({error.strerror}); training continues, and the lines are kept "
                    "in memory until the file can be written"
                )
            del self._unwritten[:-MAX_WAITING_LINES]  # all but the newest
            return
        if has_kept_lines:
            tqdm.write(f"note: {path} can be written again; it now has the {len(self._unwritten) - 1} kept lines, too")
        self._unwritten.clear()

    def close(self, error: BaseException | None = None, run: Any = None) -> int:
        """Write the rows that could not be written yet, and close the other writers.

        error: what has ended `run`, a Run; it becomes the last row of metrics.jsonl.
        Returns the number of rows that metrics.jsonl lacks.
        """
        if error is not None:
            from .complaints import end_row

            self.write(end_row(error, run))  # together with the lines that could not be written yet
        elif self._unwritten:
            self._append_lines()
        if self._unwritten:
            tqdm.write(f"note: the last {len(self._unwritten)} lines of {self._path} were not written")
        for writer in list(self._writers):  # a copy, as `_forward` removes a writer that fails
            self._forward(writer)
            missing = len(self._unsent[writer.name])
            if missing:
                tqdm.write(f"note: the last {missing} rows of {writer.name} were not written")
            try:
                writer.close()
            except Exception as error:  # services such as MLflow may raise errors of any class
                tqdm.write(f"note: {writer.name} could not be closed: {error}")
        return len(self._unwritten)

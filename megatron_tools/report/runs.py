"""Reader of the folder of a run, finished or not: settings and metrics."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpointing.relocation import relocated
from megatron.config import Config
from megatron.config.command_line import from_file
from megatron.locks.run_lock import NAME, Holder, holder_of
from megatron.rows import RowError, row_of

Row = dict[str, Any]
MOST = 400  # number of points on the axes of a page
QUIET = 300.0  # a run of another machine without a new row for this many seconds counts as stopped


def _rows_of(path: Path) -> list[Row]:
    """Return the rows of metrics.jsonl. Raises ValueError, with file and line, for a malformed row."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = row_of(line)
        except RowError as error:
            raise ValueError(f"{path}, line {number}: {error}; delete the line") from None
        if row is not None:
            found.append(row)
    return found


def read_metrics(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl, with nan for a null loss. Raises ValueError for a missing or damaged file."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: {run_dir} is not a run directory")
    rows = _rows_of(path)
    for row in rows:
        # metrics.jsonl contains null for a loss that is NaN.
        if row.get("lm_loss", 0) is None:
            row["lm_loss"] = math.nan
    return rows


def named_splits(rows: Sequence[Row], *parts: str) -> list[str]:
    """Return the splits of corpora, named data sets or tasks, such as `valid/web` or `eval/lambada`.

    parts: what the splits begin with: `train`, `valid`, `test` or `eval`.
    """
    begins = tuple(f"{part}/" for part in parts)
    found = set()
    for row in rows:
        split = str(row.get("split"))
        if split.startswith(begins):
            found.add(split)
    return sorted(found)


@dataclass(frozen=True)
class RunRead:
    """A run, as read from its folder.

    rows: content of metrics.jsonl. given: the run's settings as saved. config: the same settings, with paths changed
    to where the folder is now.
    baselines: name of a validation text -> its unigram entropy in nats per token.
    """

    name: str
    folder: Path
    config: Config
    given: Config
    rows: Sequence[Row]
    baselines: Mapping[str, float] = field(default_factory=dict)
    written: float = 0.0  # time at which metrics.jsonl was last changed, in seconds since the epoch

    def part(self, split: str) -> list[Row]:
        """Return the rows of metrics.jsonl for one split: `train`, `valid` or `test`."""
        return [row for row in self.rows if row.get("split") == split]

    @property
    def iteration(self) -> int:
        """Latest iteration in metrics.jsonl, 0 before the first row."""
        return max((row["iteration"] for row in self.rows), default=0)

    @property
    def global_batch(self) -> int | None:
        """Number of samples in an iteration, or in the largest one; None before the first training row."""
        train = self.part("train")
        if self.config.train.batch_size_schedule:
            return max(self.config.batches(1).sizes)
        return train[-1]["consumed_samples"] // train[-1]["iteration"] if train else None

    @property
    def reason(self) -> str:
        """The error that has ended the run, "" if none has; Ctrl-C is no error."""
        last = self.rows[-1] if self.rows else {}
        reason = str(last.get("reason")) if last.get("split") == "end" else ""
        return "" if reason.startswith("interrupted") else reason

    def state(self, now: float | None = None) -> str:
        """Return "finished", "failed", "running" or "stopped".

        The lock of the folder shows whether the run still runs. A lock of another machine proves nothing, so the time
        of the last row decides then.
        """
        if self.iteration >= self.config.train.train_iters:
            return "finished"
        if self.reason:
            return "failed"
        return "running" if self._runs(now) else "stopped"

    def _runs(self, now: float | None) -> bool:
        path = self.folder / NAME
        me = Holder.here()
        holder = holder_of(path)
        if holder is None or holder.is_gone(me, path):
            return False
        quiet = (now or time.time()) - self.written
        return holder.is_alive(me, path) or quiet < QUIET

    def axes(self) -> dict[str, list[float]]:
        """Return {"iteration": [...], "tokens": [...], "hours": [...]} for about MOST of the logged iterations.

        `tokens` and `hours` are the training tokens and training time up to and including each iteration. The hours do
        not include evaluation and checkpoints.
        """
        at: dict[str, list[float]] = {"iteration": [0.0], "tokens": [0.0], "hours": [0.0]}
        for row in self.part("train"):
            tokens = float(row["consumed_tokens"])
            speed = row.get("tokens_per_second")
            spent = (tokens - at["tokens"][-1]) / speed / 3600 if speed else 0.0
            at["iteration"].append(row["iteration"])
            at["tokens"].append(tokens)
            at["hours"].append(at["hours"][-1] + spent)
        last = len(at["iteration"]) - 1
        step = max(1, math.ceil((last + 1) / MOST))
        kept = sorted({*range(0, last + 1, step), last})
        found = {}
        for name, values in at.items():
            found[name] = [values[i] for i in kept]
        return found


def read_run(folder: Path, name: str | None = None, baselines: Mapping[str, float] | None = None) -> RunRead:
    """Return the run in `folder`. Raises ValueError if the folder holds no run."""
    rows = read_metrics(folder)
    given = from_file(str(folder / "config.json"))
    config = relocated(given, folder)
    written = (folder / "metrics.jsonl").stat().st_mtime
    name = name or folder.resolve().name
    return RunRead(name, folder, config, given, rows, baselines or {}, written)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return short unique names of folders: the last parts of their paths, as many as necessary."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts), default=0)
    for length in range(1, longest + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, folders))

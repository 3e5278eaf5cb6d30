"""Reader of the folder of a run, finished or not: settings and metrics."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpointing.relocation import with_own_tokenizer
from megatron.config import Config
from megatron.config.command_line import from_file
from megatron.locks.advisory import is_held
from megatron.locks.run_lock import LOCK_FILE, living_holder
from megatron.rows import RowError, parse_row

LOSS_KEYS = ("lm_loss", "ppl", "text_loss", "text_accuracy")  # numbers of a row that are NaN if the loss is

Row = dict[str, Any]
MAX_AXIS_POINTS = 400  # number of points on the axes of a page
QUIET_SECONDS = 300.0  # a run of another machine without a new row for this many seconds counts as stopped


def read_metrics(run_dir: Path) -> list[Row]:
    """Return the rows of metrics.jsonl, with nan for a null loss; [] for a run that has not written its first row.

    Raises ValueError for a folder that is no run directory and, with file and line, for a malformed row.
    """
    path = run_dir / "metrics.jsonl"
    rows: list[Row] = []
    if not path.is_file():
        if not (run_dir / "config.json").is_file():
            raise ValueError(f"{path} does not exist: {run_dir} is not a run directory")
        return rows
    for line_number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = parse_row(line)
        except RowError as error:
            raise ValueError(f"{path}, line {line_number}: {error}; delete the line") from None
        if row is None:
            continue
        # metrics.jsonl contains null for a number that is NaN. For a number that the row lacks, the default 0 skips it.
        for key in LOSS_KEYS:
            if row.get(key, 0) is None:
                row[key] = math.nan
        rows.append(row)
    return rows


def samples_per_iteration(train: Sequence[Row]) -> int:
    """Return the number of samples in each of the last iterations, from the training rows; a resume may change it."""
    last = train[-1]
    before = train[-2] if len(train) > 1 else {"consumed_samples": 0, "iteration": 0}
    samples: int = last["consumed_samples"] - before["consumed_samples"]
    iterations: int = last["iteration"] - before["iteration"]
    return samples // iterations


def named_splits(rows: Sequence[Row], *parts: str) -> list[str]:
    """Return the splits of corpora, named data sets or tasks, such as `valid/web` or `eval/lambada`.

    parts: what the splits begin with: `train`, `valid`, `test` or `eval`.
    """
    prefixes = tuple(f"{part}/" for part in parts)
    splits = set()
    for row in rows:
        split = str(row.get("split"))
        if split.startswith(prefixes):
            splits.add(split)
    return sorted(splits)


@dataclass(frozen=True)
class RunData:
    """A run, as read from its folder.

    rows: content of metrics.jsonl. saved_config: the run's settings as saved. config: the same settings, with the
    tokenizer in the folder.
    baselines: name of a validation text -> its unigram entropy in nats per token.
    """

    name: str
    folder: Path
    config: Config
    saved_config: Config
    rows: Sequence[Row]
    baselines: Mapping[str, float] = field(default_factory=dict)
    metrics_time: float = 0.0  # time at which metrics.jsonl was last changed, in seconds since the epoch

    def rows_of(self, split: str) -> list[Row]:
        """Return the rows of metrics.jsonl for one split: `train`, `valid` or `test`."""
        return [row for row in self.rows if row.get("split") == split]

    @property
    def trained(self) -> list[Row]:
        """The rows of training, except those whose iterations are all skipped by a flag, which have no loss."""
        return [row for row in self.rows_of("train") if "lm_loss" in row]

    @property
    def iteration(self) -> int:
        """Latest iteration in metrics.jsonl, 0 before the first row."""
        return max((row["iteration"] for row in self.rows), default=0)

    @property
    def global_batch(self) -> int | None:
        """Number of samples in an iteration, or in the largest one; None if unknown before the first training row."""
        train = self.rows_of("train")
        if self.config.train.batch_size_schedule:
            return max(self.config.batch_schedule(1).sizes)
        return samples_per_iteration(train) if train else None

    @property
    def reason(self) -> str:
        """The error in the row that the end of a run writes, "" if there is none; Ctrl-C is no error."""
        last_row = self.rows[-1] if self.rows else {}
        # The row of the end has the split `end`. A run that was killed has none.
        reason = str(last_row.get("reason")) if last_row.get("split") == "end" else ""
        return "" if reason.startswith("interrupted") else reason

    def state(self, now: float | None = None) -> str:
        """Return "finished", "failed", "running" or "stopped".

        The lock of the folder shows whether the run still runs. If the lock of another machine may be invisible, the
        time of the last row decides.
        """
        if self.iteration >= self.config.train.train_iters:
            return "finished"
        if self.reason:
            return "failed"
        path = self.folder / LOCK_FILE
        if living_holder(path) is None:
            return "stopped"
        quiet_seconds = (now or time.time()) - self.metrics_time
        return "running" if is_held(path) is True or quiet_seconds < QUIET_SECONDS else "stopped"

    def axes(self) -> dict[str, list[float]]:
        """Return {"iteration": [...], "tokens": [...], "hours": [...]} for about MAX_AXIS_POINTS iterations.

        `tokens` and `hours` are the training tokens and training time up to and including each iteration. The hours do
        not include evaluation and checkpoints, nor the iterations of another run that this run continues.
        """
        train = self.rows_of("train")
        # The first row has at most the iterations of one log interval; those before are of another run. If the first
        # rows have the iterations 410 and 420, the interval is 10 and 409 // 10 * 10 = 400 are of another run.
        logged = [row["iteration"] for row in train[:2]] or [1]
        interval = max(logged[-1] - logged[0], self.config.log.log_interval or 10)
        of_other_run = (logged[0] - 1) // interval * interval
        points = [(0.0, 0.0, 0.0)]
        for row in train:
            iteration, tokens, hours = points[-1]
            consumed = float(row["consumed_tokens"])
            speed = row.get("tokens_per_second")
            done = row["iteration"] - iteration
            # Iterations that a flag skips (passed_over) consume their samples, too, but take no time.
            timeless = of_other_run + (row.get("passed_over") or 0)
            of_other_run = 0  # they are all before the first row
            timed_share = max(1 - timeless / done, 0.0) if done > 0 else 1.0
            # A row gives the speed since the row before it.
            added_hours = timed_share * (consumed - tokens) / speed / 3600 if speed else 0.0
            points.append((row["iteration"], consumed, hours + added_hours))
        step = math.ceil(len(points) / MAX_AXIS_POINTS)
        kept = points[:-1:step] + points[-1:]  # every step-th point, and always the last
        columns = map(list, zip(*kept, strict=True))
        return dict(zip(("iteration", "tokens", "hours"), columns, strict=True))


def read_run(folder: Path, name: str | None = None) -> RunData:
    """Return the run in `folder`. Raises ValueError if the folder holds no run."""
    rows = read_metrics(folder)
    saved_config = from_file(str(folder / "config.json"))
    config = with_own_tokenizer(saved_config, folder)
    metrics_time = (folder / ("metrics.jsonl" if rows else "config.json")).stat().st_mtime
    name = name or folder.resolve().name
    return RunData(name, folder, config, saved_config, rows, metrics_time=metrics_time)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return short unique names of folders: the last parts of their paths, as many as necessary."""
    path_parts = [folder.resolve().parts for folder in folders]
    most_parts = max(map(len, path_parts), default=0)
    # runs/a/x and runs/b/x both end in x, so they need two parts: a/x and b/x.
    for count in range(1, most_parts + 1):
        names = ["/".join(parts[-count:]) for parts in path_parts]
        if len(set(names)) == len(names):
            return names
    return list(map(str, folders))

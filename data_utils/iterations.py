"""Iterations of a run and the numbers of their samples, from its settings and the metrics that it has logged."""

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.batches import BatchSchedule
from megatron.data.skips import skips_of
from megatron.rows import row_of


class _Anchor(NamedTuple):
    """State of a run: iterations done, samples consumed, and the batch sizes from here on."""

    iteration: int
    samples: int
    batches: BatchSchedule


class Iterations:
    """Iterations of the run in `run_dir`, numbered from 1, and their samples, numbered from 0.

    run_dir: None for a run that has not begun.
    logged: number of the last iteration in metrics.jsonl, 0 without rows. total: number of samples of the whole run.
    """

    def __init__(self, config: Config, run_dir: Path | None) -> None:
        rows = _rows(run_dir / "metrics.jsonl") if run_dir else [(0, 0)]
        train = config.train
        self.logged = rows[-1][0]
        self._anchors: list[_Anchor] = []
        batches = config.batches(1)
        for (iteration, samples), (next_iteration, next_samples) in pairwise(rows):
            if not train.batch_size_schedule:
                size = (next_samples - samples) // (next_iteration - iteration)
                batches = BatchSchedule((0,), (max(size, 1),))
            self._anchors.append(_Anchor(iteration, samples, batches))
        last = _Anchor(*rows[-1], batches)
        self._anchors.append(last)
        left = max(train.train_iters - last.iteration, 0)
        self.total = batches.after(last.samples, left)
        self._skips = skips_of(train)

    def of_sample(self, n: int) -> int:
        """Return the iteration that trains on sample n."""
        number = bisect_right(self._anchors, n, key=lambda each: each.samples)
        at = self._anchors[number - 1]
        return at.iteration + at.batches.iterations(at.samples, n) + 1

    def samples(self, iteration: int) -> range:
        """Return the numbers of the samples of an iteration."""
        number = bisect_right(self._anchors, iteration - 1, key=lambda each: each.iteration)
        at = self._anchors[number - 1]
        first = at.batches.after(at.samples, iteration - 1 - at.iteration)
        return range(first, first + at.batches.size_at(first))

    def is_skipped(self, iteration: int) -> bool:
        """Return whether a --skip-* flag skips the iteration."""
        found = self.samples(iteration)
        return self._skips.hold(iteration, found.start, len(found))


def _rows(path: Path) -> list[tuple[int, int]]:
    """Return (iteration, consumed samples) of the training rows of a metrics.jsonl, in order, after (0, 0)."""
    if not path.is_file():
        return [(0, 0)]
    found = {0: 0}
    text = path.read_text(encoding="utf-8", errors="replace")
    for row in map(row_of, text.splitlines()):
        if row and row.get("split") == "train":
            found[row["iteration"]] = row["consumed_samples"]
    return sorted(found.items())

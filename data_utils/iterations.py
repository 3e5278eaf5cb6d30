"""Iterations of a run and the numbers of their samples, from its settings and the metrics that it has logged."""

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.config.batches import BatchSchedule
from megatron.data.skips import skips_of
from megatron.rows import parse_row


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
        # Without --batch-size-schedule, the size of one replica, which applies only until rows show the real size.
        schedule = config.batch_schedule(1)
        is_scheduled = train.batch_size_schedule is not None
        batches = schedule
        # Each row becomes an anchor with the batch sizes up to the next row.
        for (iteration, samples), (next_iteration, next_samples) in pairwise(rows):
            batches = schedule
            done = next_iteration - iteration
            # Rows of an earlier start may have other sizes: a resume may change --gas, or leave out the past sizes.
            # Only the sum of the sizes is known, so they are assumed to differ by at most 1, the larger ones first: 43
            # samples in 10 iterations become 3 iterations of 5 and 7 of 4.
            if not is_scheduled or schedule.advance(samples, done) != next_samples:
                size, remainder = divmod(next_samples - samples, done)
                larger = size + 1
                # A size of 0, as after fewer samples than iterations, would be invalid.
                batches = BatchSchedule((0, samples + remainder * larger), (larger, max(size, 1)))
            self._anchors.append(_Anchor(iteration, samples, batches))
        # After the last row, the schedule applies or, without one, the size between the last two rows.
        if is_scheduled:
            batches = schedule
        last = _Anchor(*rows[-1], batches)
        self._anchors.append(last)
        remaining = max(train.train_iters - last.iteration, 0)
        self.total = batches.advance(last.samples, remaining)
        self._skips = skips_of(train)

    def of_sample(self, sample: int) -> int:
        """Return the iteration that trains on `sample`."""
        # The last anchor at or before the sample.
        number = bisect_right(self._anchors, sample, key=lambda each: each.samples)
        anchor = self._anchors[number - 1]
        return anchor.iteration + anchor.batches.iterations_between(anchor.samples, sample) + 1

    def samples(self, iteration: int) -> range:
        """Return the numbers of the samples of an iteration."""
        # The last anchor at which at most the iterations before this one were done.
        number = bisect_right(self._anchors, iteration - 1, key=lambda each: each.iteration)
        anchor = self._anchors[number - 1]
        first = anchor.batches.advance(anchor.samples, iteration - 1 - anchor.iteration)
        return range(first, first + anchor.batches.size_at(first))

    def is_skipped(self, iteration: int) -> bool:
        """Return whether a --skip-* flag skips the iteration."""
        samples = self.samples(iteration)
        return self._skips.should_skip(iteration, samples.start, len(samples))


def _rows(path: Path) -> list[tuple[int, int]]:
    """Return (iteration, consumed samples) of the training rows of a metrics.jsonl, in order, after (0, 0)."""
    consumed = {0: 0}
    text = ""
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    for row in map(parse_row, text.splitlines()):
        if row and row.get("split") == "train":
            consumed[row["iteration"]] = row["consumed_samples"]
    return sorted(consumed.items())

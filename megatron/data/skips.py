"""Iterations that a run skips: their samples count as consumed, but the model is not trained on them.

If an iteration contains one sample to skip, the whole iteration is skipped. So iteration k has the same samples for any
number of ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..config.output import parse_range

Range = tuple[int, int]  # both ends included


def parse_ranges(words: Iterable[str]) -> tuple[Range, ...]:
    """Parse `7` and `10-12` into (7, 7) and (10, 12)."""
    return tuple(map(parse_range, words))


@dataclass(frozen=True)
class Skips:
    """Ranges of iterations and of samples to skip.

    iterations: numbered from 1, as in log lines. samples: numbered from 0.
    """

    iterations: tuple[Range, ...] = ()
    samples: tuple[Range, ...] = ()

    def should_skip(self, iteration: int, first: int, count: int) -> bool:
        """Return True if `iteration` must be skipped; it contains samples `first` to `first + count` - 1."""
        if any(low <= iteration <= high for low, high in self.iterations):
            return True
        # The iteration overlaps a range unless one of them lies completely before the other.
        return any(low < first + count and first <= high for low, high in self.samples)


def skips_of(train: Any) -> Skips:
    """Return what --skip-iterations and --skip-samples in the settings of training list."""
    return Skips(parse_ranges(train.skip_iterations or ()), parse_ranges(train.skip_samples or ()))


def make_skip_check(train: Any, batches: Any, iteration: int, consumed: int) -> Callable[[int], bool]:
    """Return a function from an iteration's first sample to whether a --skip-* flag skips it.

    batches: schedule of the global batch size. iteration, consumed: iterations and samples of the run so far.
    """
    skips = skips_of(train)

    def skips_iteration(first: int) -> bool:
        # Iterations are numbered from 1: after 5 iterations, the one that begins at sample `consumed` is number 6.
        number = iteration + batches.iterations_between(consumed, first) + 1
        return skips.should_skip(number, first, batches.size_at(first))

    return skips_iteration

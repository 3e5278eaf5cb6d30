"""Iterations that a run skips: their samples count as consumed, but the model is not trained on them.

If an iteration contains one sample to skip, the whole iteration is skipped. So iteration k has the same samples for any
number of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]  # both ends included


def parse_ranges(words: Iterable[str]) -> tuple[Range, ...]:
    """Parse `7` and `10-12` into (7, 7) and (10, 12)."""
    ranges = []
    for word in words:
        first, _, last = word.partition("-")
        ranges.append((int(first), int(last or first)))
    return tuple(ranges)


@dataclass(frozen=True)
class Skips:
    """Ranges of iterations and of samples to skip.

    iterations: numbered from 1, as in log lines. samples: numbered from 0.
    """

    iterations: tuple[Range, ...] = ()
    samples: tuple[Range, ...] = ()

    def hold(self, iteration: int, first: int, count: int) -> bool:
        """Return True if `iteration` must be skipped; it contains samples `first` to `first + count` - 1."""
        if any(low <= iteration <= high for low, high in self.iterations):
            return True
        return any(low < first + count and first <= high for low, high in self.samples)

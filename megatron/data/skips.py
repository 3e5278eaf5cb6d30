"""Which iterations of a run are passed over: their samples count as read, but nothing is learned from them.

A batch with any sample that is named goes as a whole, so that iteration k keeps its samples in every layout.
"""

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]  # both ends included


def parse_ranges(words: Iterable[str]) -> tuple[Range, ...]:
    """Of `7` and `10-12` (7, 7) and (10, 12)."""
    ends = [word.partition("-") for word in words]
    return tuple((int(first), int(last or first)) for first, _, last in ends)


@dataclass(frozen=True)
class Skips:
    """iterations: as the lines of a run count them, from 1. samples: as they are numbered, from 0."""

    iterations: tuple[Range, ...] = ()
    samples: tuple[Range, ...] = ()

    def hold(self, iteration: int, first: int, count: int) -> bool:
        """Whether iteration number `iteration`, of samples `first` to `first + count` - 1, is passed over."""
        return any(low <= iteration <= high for low, high in self.iterations) or any(
            low < first + count and first <= high for low, high in self.samples
        )

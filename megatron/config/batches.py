"""Schedule of the global batch size: the samples of each iteration, as a pure function of the consumed samples."""

import itertools
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmbt]?)(_samples|_tokens)?", re.IGNORECASE)
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
FORM = "must be a list of START:SIZE such as 0:256 500M:512, with starts from 0 on in ascending order"


class Entry(NamedTuple):
    """A size of the global batch, and the number of consumed samples or tokens from which it applies."""

    start: int
    in_samples: bool
    size: int


def parse_entries(text: str) -> list[Entry]:
    """Parse `0:256 500M:512 2M_samples:1024`. A start without unit is a number of tokens, as in Megatron-LM.

    Raises ValueError if the text is not of this form.
    """
    entries = []
    for word in text.replace(",", " ").split():
        start, _, size = word.partition(":")
        begin = _NUMBER.fullmatch(start)
        samples = _NUMBER.fullmatch(size)
        if begin is None or samples is None or samples[3]:
            raise ValueError(f"{word} is not START:SIZE")
        unit = (begin[3] or "").lower()
        entries.append(Entry(_whole(begin), unit == "_samples", _whole(samples)))
    sizes = [entry.size for entry in entries]
    if not entries or entries[0].start or 0 in sizes:
        raise ValueError("no entry starts at 0, or a size is 0")
    return entries


def _whole(found: "re.Match[str]") -> int:
    return int(float(found[1]) * _SUFFIXES[found[2].lower()])


def schedule_problem(text: str) -> str | None:
    """Return an error text if `text` is not a schedule of the global batch size, else None."""
    try:
        parse_entries(text)
    except (ValueError, OverflowError):  # such as 1e400
        return FORM
    return None


@dataclass(frozen=True)
class BatchSchedule:
    """Number of samples of an iteration, as a function of its first sample.

    An iteration whose first sample is starts[i] or later has sizes[i] samples. `starts` ascend from 0.
    Only the position in samples counts: how many iterations came before has no influence.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        words = [str(self.sizes[0])]
        for size, start in zip(self.sizes[1:], self.starts[1:], strict=True):
            words.append(f"{size} from sample {start} on")
        return ", ".join(words)

    def size_at(self, first: int) -> int:
        """Return the number of samples of the iteration whose first sample is `first`."""
        return self.sizes[bisect_right(self.starts, first) - 1]

    def after(self, first: int, iterations: int) -> int:
        """Return the position, in samples, after `iterations` iterations from sample `first` on."""
        for start, size, count in self._ranges(first):
            if iterations <= count:
                return start + iterations * size
            iterations -= count
        raise AssertionError("the last size has no end")

    def iterations(self, first: int, end: int) -> int:
        """Return how many whole iterations from sample `first` on fit in front of sample `end`."""
        done = 0
        for start, size, count in self._ranges(first):
            fitting = max(end - start, 0) // size
            if fitting < count:
                return done + fitting
            done += count
        raise AssertionError("the last size has no end")

    def _ranges(self, first: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first sample, size, number) for each range of iterations of one size, from sample `first` on."""
        at = bisect_right(self.starts, first) - 1
        for size, end in itertools.zip_longest(self.sizes[at:], self.starts[at + 1 :]):
            count = sys.maxsize  # the last size has no end
            if end is not None:
                count = max(-(-(end - first) // size), 0)
            yield first, size, count
            first += count * size


def schedule_of(text: str, tokens: int) -> BatchSchedule:
    """Return the schedule in `text`, see `parse_entries`. tokens: tokens of a sample, for starts in tokens."""
    entries = parse_entries(text)
    starts = [each.start if each.in_samples else each.start // tokens for each in entries]
    return BatchSchedule(tuple(starts), tuple(each.size for each in entries))

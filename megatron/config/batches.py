"""Schedule of the global batch size: the samples of each iteration, as a pure function of the consumed samples."""

import itertools
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d*)?(?:e\d+)?)(?P<suffix>[kmbt]?)(?P<unit>_samples|_tokens)?", re.IGNORECASE)
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
INVALID_SCHEDULE = "must be a list of START:SIZE such as 0:256 500M:512, with starts from 0 on in ascending order"


class Consumed(NamedTuple):
    """The samples that a run has consumed, and their tokens; a resume may have changed the length of a sample.

    tokens: 0 if unknown, as in the checkpoints of other programs.
    """

    samples: int = 0
    tokens: int = 0

    def sample_at(self, token: int, sample_tokens: int) -> Fraction:
        """Return the number of samples up to a number of tokens, if each sample to come has `sample_tokens` tokens."""
        if not self.tokens:
            return Fraction(token, sample_tokens)
        if token < self.tokens:
            # Only the sum of the past is known, so all consumed samples count with their mean length.
            return Fraction(token * self.samples, self.tokens)
        return self.samples + Fraction(token - self.tokens, sample_tokens)


NOTHING_CONSUMED = Consumed()


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
        start_match = _NUMBER.fullmatch(start)
        size_match = _NUMBER.fullmatch(size)
        if start_match is None or size_match is None or size_match["unit"]:
            raise ValueError(f"{word} is not START:SIZE")
        unit = (start_match["unit"] or "").lower()
        in_samples = unit == "_samples"  # `2M_samples` has the number 2, the suffix M and the unit _samples
        entries.append(Entry(_parse_count(start_match), in_samples, _parse_count(size_match)))
    sizes = [entry.size for entry in entries]
    if not entries or entries[0].start or 0 in sizes:
        raise ValueError("no entry starts at 0, or a size is 0")
    return entries


def _parse_count(match: "re.Match[str]") -> int:
    """Return the whole number of a match of _NUMBER: 4.1M is 4,100,000. Raises ValueError if it is too large."""
    number = match["number"]
    if math.isinf(float(number)):  # such as 1e400, or an exponent that no memory could hold as an integer
        raise ValueError(f"{number} is too large")
    # As a float, 4.1 x 10**6 would lie just below 4,100,000.
    return int(Decimal(number) * _SUFFIXES[match["suffix"].lower()])


def schedule_problem(text: str) -> str | None:
    """Return an error text if `text` is not a schedule of the global batch size, else None."""
    try:
        parse_entries(text)
    except ValueError:
        return INVALID_SCHEDULE
    return None


class BatchSchedule(NamedTuple):
    """Number of samples of an iteration, as a function of its first sample.

    An iteration whose first sample is starts[i] or later has sizes[i] samples. `starts` ascend from 0.
    Only the position in samples counts: how many iterations came before has no influence.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        parts = [str(self.sizes[0])]
        for size, start in zip(self.sizes[1:], self.starts[1:], strict=True):
            parts.append(f"{size} from sample {start} on")
        return ", ".join(parts)

    def size_at(self, first: int) -> int:
        """Return the number of samples of the iteration whose first sample is `first`."""
        return self.sizes[bisect_right(self.starts, first) - 1]

    def after(self, first: int) -> "BatchSchedule":
        """Return the part of this schedule from sample `first` on."""
        current = bisect_right(self.starts, first) - 1
        return BatchSchedule((first, *self.starts[current + 1 :]), self.sizes[current:])

    def advance(self, first: int, iterations: int) -> int:
        """Return the position, in samples, after `iterations` iterations from sample `first` on."""
        for start, size, count in self._ranges(first):
            if iterations <= count:
                return start + iterations * size
            iterations -= count
        raise AssertionError("the last size has no end")

    def iterations_between(self, first: int, end: int) -> int:
        """Return how many whole iterations from sample `first` on fit in front of sample `end`."""
        done = 0
        for start, size, count in self._ranges(first):
            fitting = max(end - start, 0) // size  # whole iterations of this size that end by sample `end`
            if fitting < count:
                return done + fitting
            done += count
        raise AssertionError("the last size has no end")

    def _ranges(self, first: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first sample, size, number) for each range of iterations of one size, from sample `first` on."""
        ahead = self.after(first)
        # Each size ends at the start of the next one. The last size has no end: None.
        # For example, size 4 and from sample 10 on size 8 give (0, 4, 3): the third iteration begins at 8 and keeps
        # size 4, so the next range begins at 12.
        for size, end in itertools.zip_longest(ahead.sizes, ahead.starts[1:]):
            count = sys.maxsize
            if end is not None:
                # -(-a // b) rounds up: -(-(10 - 0) // 4) is 3. An iteration that begins before `end` keeps its size. It
                # may even pass the end of a later range: then `first` exceeds `end`, and that range has 0 iterations.
                count = max(-(-(end - first) // size), 0)
            yield first, size, count
            first += count * size


def parse_batch_schedule(text: str, sample_tokens: int) -> BatchSchedule:
    """Return the schedule in `text`, see `parse_entries`. sample_tokens: tokens of a sample, for starts in tokens."""
    starts = []
    sizes = []
    for entry in parse_entries(text):
        start = entry.start
        if not entry.in_samples:
            start //= sample_tokens
        starts.append(start)
        sizes.append(entry.size)
    return BatchSchedule(tuple(starts), tuple(sizes))


def schedule_in_samples(text: str, sample_tokens: int, consumed: Consumed) -> str:
    """Return the schedule in `text` with starts in samples, for a run that has consumed samples of other lengths.

    sample_tokens: tokens of each sample to come.
    """
    sizes = {}
    for entry in parse_entries(text):
        start = entry.start
        if not entry.in_samples:
            start = math.floor(consumed.sample_at(start, sample_tokens))
        sizes[start] = entry.size  # of starts in the past that fall on one sample, the last one counts
    # A start of 0 needs no unit.
    return " ".join(f"{start}_samples:{size}" if start else f"0:{size}" for start, size in sizes.items())

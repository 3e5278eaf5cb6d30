"""Where the n-th training sample lies: a pure function of (document lengths, seed, n), nothing on disk.

Each epoch shuffles the documents, lays them end to end and cuts the line into samples, whose
order is shuffled again. A sample is found by two binary searches when it is asked for, so
there is no index file to build, to race for or to go stale, and the order does not depend on
how long a run is, on its layout or on its number of workers. (Megatron shuffles the documents
of all epochs together, so its order changes with --train-iters.)

An epoch is the documents once, less the tokens at its end that fill no sample.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 21  # documents and samples of an epoch; of larger ones a single epoch is kept in memory


class Epoch(NamedTuple):
    """One pass over the documents."""

    order: NDArray[np.integer]  # [documents] which document stands at each place
    ends: NDArray[np.int64]  # [documents] tokens up to the end of each place
    samples: NDArray[np.integer]  # [samples] the order in which the samples are taken


_NONE: tuple[int, Epoch] = -1, Epoch(*[np.empty(0, np.int64)] * 3)


Piece = tuple[int, int, int]


class SampleOrder:
    """Samples of `length` + `overlap` tokens; sample i+1 of an epoch begins `length` tokens after sample i.

    sizes: int [documents] tokens of each. shuffle False takes documents and samples as they come.
    Raises ValueError if all documents together do not fill one sample.
    """

    def __init__(
        self, sizes: NDArray[np.integer], length: int, seed: int, stream: str, overlap: int = 1, shuffle: bool = True
    ) -> None:
        self.sizes = sizes
        self.length, self.overlap, self.shuffle = length, overlap, shuffle
        self.seed = [seed, *stream.encode()]
        tokens = int(sizes.sum(dtype=np.int64))
        self.per_epoch = max((tokens - overlap) // length, 0)
        if not self.per_epoch:
            raise ValueError(
                f"{tokens} tokens do not fill one sample of {length} + {overlap}; "
                f"take a larger corpus or a smaller --seq-length"
            )
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        self._latest = _NONE

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: epochs follow from the rest and need not travel."""
        return {**self.__dict__, "_epochs": OrderedDict(), "_latest": _NONE}

    def epoch(self, number: int) -> Epoch:
        """The order of epoch `number`, made when first asked for."""
        if number == self._latest[0]:
            return self._latest[1]
        if number not in self._epochs:
            kept = 2 if len(self.sizes) + self.per_epoch <= SMALL else 1
            self._latest = _NONE  # or it would keep an epoch in memory
            while len(self._epochs) >= kept:
                self._epochs.popitem(last=False)
            documents = self._order(len(self.sizes), number, 0)
            ends = np.cumsum(self.sizes[documents], dtype=np.int64)
            self._epochs[number] = Epoch(documents, ends, self._order(self.per_epoch, number, 1))
        self._epochs.move_to_end(number)
        self._latest = number, self._epochs[number]
        return self._latest[1]

    def _order(self, count: int, epoch: int, stream: int) -> NDArray[np.integer]:
        """A permutation of `count` things, in half the memory where 32 bits are enough."""
        order: NDArray[np.integer] = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
        if self.shuffle:
            np.random.default_rng([*self.seed, epoch, stream]).shuffle(order)
        return order

    def places(self, first: int, count: int) -> NDArray[np.int64]:
        """Where samples `first` to `first + count` lie in the text of all epochs, counted in samples."""
        found = np.empty(count, dtype=np.int64)
        at = 0
        while at < count:
            number, begin = divmod(first + at, self.per_epoch)
            take = min(count - at, self.per_epoch - begin)
            found[at : at + take] = self.epoch(number).samples[begin : begin + take]
            found[at : at + take] += number * self.per_epoch
            at += take
        return found

    def pieces(self, n: int) -> list[Piece]:
        """(document, first token, token behind the last) of each document that sample n consists of, in order.

        n is not bounded: epochs follow each other.
        """
        if n < 0:
            raise IndexError(f"sample {n}")
        number, at = divmod(n, self.per_epoch)
        order, ends, samples = self.epoch(number)
        begin = samples.item(at) * self.length
        end = begin + self.length + self.overlap
        place = int(ends.searchsorted(begin, side="right"))
        base = ends.item(place - 1) if place else 0  # where the document begins in the line of all of them
        skipped, found = begin - base, []
        while base < end:
            stop = ends.item(place)
            if stop > base:
                found.append((order.item(place), 0, stop - base))
            base = stop
            place += 1
        # Of the first and of the last it is a part.
        document, _, stop = found[0]
        found[0] = document, skipped, stop
        document, start, stop = found[-1]
        found[-1] = document, start, stop - (base - end)
        return found

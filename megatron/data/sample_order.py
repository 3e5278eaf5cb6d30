"""Where the n-th training sample lies: a pure function of (document lengths, seed, n), nothing on disk.

Each epoch shuffles the documents, lays them end to end and cuts the line into samples, whose
order is shuffled again. A sample is found by two binary searches when it is asked for, so
there is no index file to build, to race for or to go stale, and the order does not depend on
how long a run is, on its layout or on its number of workers. (Megatron shuffles the documents
of all epochs together, so its order changes with --train-iters.)

An epoch is the documents once, less the tokens at its end that fill no sample.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 21  # documents and samples of an epoch; of larger ones a single epoch is kept in memory


class Epoch(NamedTuple):
    """One pass over the documents."""

    order: NDArray[np.integer]  # [documents] which document stands at each place
    ends: NDArray[np.int64]  # [documents] tokens up to the end of each place
    samples: NDArray[np.integer]  # [samples] the order in which the samples are taken


class Stretch(NamedTuple):
    """Tokens `start` to `end` of one document."""

    document: int
    start: int
    end: int


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

    def epoch(self, number: int) -> Epoch:
        """The order of epoch `number`, made when first asked for."""
        if number not in self._epochs:
            kept = 2 if len(self.sizes) + self.per_epoch <= SMALL else 1
            while len(self._epochs) >= kept:
                self._epochs.popitem(last=False)
            documents, samples = self._arange(len(self.sizes)), self._arange(self.per_epoch)
            if self.shuffle:
                np.random.default_rng([*self.seed, number, 0]).shuffle(documents)
                np.random.default_rng([*self.seed, number, 1]).shuffle(samples)
            self._epochs[number] = Epoch(documents, np.cumsum(self.sizes[documents], dtype=np.int64), samples)
        self._epochs.move_to_end(number)
        return self._epochs[number]

    @staticmethod
    def _arange(count: int) -> NDArray[np.integer]:
        """Half the memory where 32 bits are enough."""
        return np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)

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

    def stretches(self, n: int) -> list[Stretch]:
        """The pieces of documents that sample n consists of, in order. n is not bounded: epochs follow each other."""
        if n < 0:
            raise IndexError(f"sample {n}")
        number, at = divmod(n, self.per_epoch)
        epoch = self.epoch(number)
        begin = int(epoch.samples[at]) * self.length
        end = begin + self.length + self.overlap
        first, last = epoch.ends.searchsorted((begin, end - 1), side="right")
        found = []
        for place in range(int(first), int(last) + 1):
            document = int(epoch.order[place])
            size = int(self.sizes[document])
            base = int(epoch.ends[place]) - size
            start, stop = max(begin - base, 0), min(end - base, size)
            if stop > start:
                found.append(Stretch(document, start, stop))
        return found

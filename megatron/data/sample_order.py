"""Where the n-th training sample lies: a pure function of (document lengths, seed, n).

Each epoch shuffles the documents, lays them end to end and cuts the line into samples, whose
order is shuffled again. A sample is found by two binary searches when it is asked for, and the order does not depend on
how long a run is, on its layout or on its number of workers. (Megatron shuffles the documents
of all epochs together, so its order changes with --train-iters.)

An epoch is the documents once, less the tokens at its end that fill no sample. A small one is made in memory when it is first
asked for. A large one is a file that a node has once (order_file.py); it follows from the rest and may be deleted at any time.
"""

import hashlib
import sys
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import order_file

SMALL = 1 << 20  # documents and samples of an epoch that is kept in memory


class Epoch(NamedTuple):
    """One pass over the documents."""

    order: NDArray[np.integer]  # [documents] which document stands at each place
    ends: NDArray[np.integer]  # [documents] tokens up to the end of each place
    samples: NDArray[np.integer]  # [samples] the order in which the samples are taken


_NONE: tuple[int, Epoch] = -1, Epoch(*[np.empty(0, np.int64)] * 3)


Piece = tuple[int, int, int]


class HasSizes(Protocol):
    """An opened corpus."""

    def document_sizes(self, documents: range) -> NDArray[np.integer[Any]]:
        """Tokens of each of these documents."""
        ...


class Sizes(NamedTuple):
    """Tokens of each of some documents of a corpus, without a copy for every process that is told of them."""

    indexed: HasSizes
    documents: range

    def read(self) -> NDArray[np.integer[Any]]:
        """Tokens of each of the documents, in their order."""
        return self.indexed.document_sizes(self.documents)


class SampleOrder:
    """Samples of `length` + `overlap` tokens; sample i+1 of an epoch begins `length` tokens after sample i.

    sizes: int [documents] tokens of each. shuffle False takes documents and samples as they come. folder: where the
    files of large epochs are kept; without it all is kept in memory.
    Raises ValueError if all documents together do not fill one sample.
    """

    def __init__(
        self, sizes: NDArray[np.integer] | Sizes, length: int, seed: int, stream: str, overlap: int = 1,
        shuffle: bool = True, folder: str | None = None,
    ) -> None:  # fmt: skip
        self._sizes, self._folder = sizes, folder
        self.length, self.overlap, self.shuffle = length, overlap, shuffle
        self.seed = [seed, *stream.encode()]
        tokens, self.documents, self._digest = self._read_sizes()
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

    def sizes(self) -> NDArray[np.integer]:
        """int [documents] tokens of each."""
        return self._sizes.read() if isinstance(self._sizes, Sizes) else self._sizes

    def _read_sizes(self) -> tuple[int, int, str]:
        """(tokens, documents, a digest of all their lengths where there may be files)."""
        sizes, tokens, digest = self.sizes(), 0, hashlib.blake2b(digest_size=16)
        for piece in order_file.pieces(len(sizes)):
            tokens += int(sizes[piece].sum(dtype=np.int64))
            if self._folder:
                digest.update(sizes[piece].astype(np.int64).tobytes())
            if len(sizes) > SMALL:
                order_file.forget(sizes)
        return tokens, len(sizes), digest.hexdigest()

    def epoch(self, number: int) -> Epoch:
        """The order of epoch `number`, made when first asked for."""
        if number == self._latest[0]:
            return self._latest[1]
        if number not in self._epochs:
            small = self.documents + self.per_epoch <= SMALL
            self._latest = _NONE  # or it would keep an epoch in memory
            while len(self._epochs) >= (2 if small else 1):
                self._epochs.popitem(last=False)
            self._epochs[number] = self._in_memory(number) if small or not self._folder else self._in_file(number)
        self._epochs.move_to_end(number)
        self._latest = number, self._epochs[number]
        return self._latest[1]

    def forget(self) -> None:
        """Let go of the pages of a mapped epoch."""
        for array in self._latest[1]:
            order_file.forget(array)

    def _in_memory(self, number: int) -> Epoch:
        arrays = {name: np.empty(count, dtype) for name, (count, dtype) in self._shapes().items()}
        self._fill(number, arrays)
        return Epoch(arrays["order"], arrays["ends"], arrays["samples"])

    def _in_file(self, number: int) -> Epoch:
        assert self._folder
        try:
            made = order_file.mapped(
                self._folder, self._name(number), self._shapes(), lambda arrays: self._fill(number, arrays)
            )
        except OSError as error:
            where = "every process keeps it in memory; set TMPDIR to a folder with room to have it once"
            print(f"the order of samples cannot be kept in a file ({error.strerror}): {where}", file=sys.stderr)
            return self._in_memory(number)
        for array in made.values():
            order_file.forget(array)
        order_file.remove(self._folder, self._name(number - 2))  # they are as large as the lengths of all documents
        return Epoch(made["order"], made["ends"], made["samples"])

    def _name(self, number: int) -> str:
        """Of all that an epoch follows from."""
        facts = (self._digest, self.documents, self.length, self.overlap, self.shuffle, self.seed, number)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest() + ".order"

    def _shapes(self) -> order_file.Arrays:
        """Of an epoch's arrays; half the memory where 32 bits are enough."""

        def numbers(count: int) -> type[np.integer[Any]]:
            return np.int32 if count < 2**31 else np.int64

        documents, samples = self.documents, self.per_epoch
        return {
            "ends": (documents, np.int64), "order": (documents, numbers(documents)), "samples": (samples, numbers(samples)),
        }  # fmt: skip

    def _fill(self, number: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Make an epoch, in the memory of its arrays only."""
        sizes, order, ends = self.sizes(), arrays["order"], arrays["ends"]
        self._permute(order, number, 0)
        self._permute(arrays["samples"], number, 1)
        total = 0
        for piece in order_file.pieces(len(order)):
            ends[piece] = total + np.cumsum(sizes[order[piece]], dtype=np.int64)
            total = int(ends[piece][-1])
        order_file.forget(sizes)

    def _permute(self, array: NDArray[Any], epoch: int, stream: int) -> None:
        for piece in order_file.pieces(len(array)):
            array[piece] = np.arange(piece.start, piece.stop)
        if self.shuffle:
            np.random.default_rng([*self.seed, epoch, stream]).shuffle(array)

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
        """(document, first token, token after the last) of each document that sample n consists of, in order.

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

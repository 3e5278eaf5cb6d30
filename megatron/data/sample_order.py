"""Position of training sample n in the corpus, a pure function of the document lengths, the seed and n.

Each epoch shuffles the documents, concatenates them, cuts the text into samples and shuffles the samples. A sample is
located on demand by binary search. The order does not depend on the length of a run, the number of ranks or the number
of data workers. (Megatron shuffles the documents of all epochs together, so its order changes with --train-iters.)

An epoch covers each document once, except the last tokens, which do not fill a sample. The order of a small epoch is
computed in memory on first use. The order of a large epoch is stored in a file that all processes of a node share
(order_file.py). If the file is deleted, it is computed again.
"""

import hashlib
import sys
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import order_file

SMALL = 1 << 20  # the order of an epoch is kept in memory if documents + samples <= SMALL, else in a file


class Epoch(NamedTuple):
    """Order of one pass over the documents."""

    order: NDArray[np.integer]  # [documents] shuffled document indices
    ends: NDArray[np.integer]  # [documents] entry i: number of tokens in the documents order[0] to order[i]
    samples: NDArray[np.integer]  # [samples] shuffled sample indices


_NONE: tuple[int, Epoch] = -1, Epoch(*[np.empty(0, np.int64)] * 3)


Piece = tuple[int, int, int]


class HasSizes(Protocol):
    """Protocol of a corpus that provides the lengths of its documents, such as `IndexedDataset`."""

    def document_sizes(self, documents: range) -> NDArray[np.integer[Any]]:
        """Return the number of tokens of each document in the range."""
        ...


class Sizes(NamedTuple):
    """Lengths of the documents in a range, read from the corpus on demand so that a process needs no copy."""

    indexed: HasSizes
    documents: range

    def read(self) -> NDArray[np.integer[Any]]:
        """Return the number of tokens of each document in the range."""
        return self.indexed.document_sizes(self.documents)


class SampleOrder:
    """Order of samples of `length` + `overlap` tokens, which start every `length` tokens in the shuffled text.

    sizes: number of tokens of each document, int [documents]. shuffle=False keeps documents and samples in
    corpus order. stream: any string, used as part of the random seed; different strings give independent orders.
    folder: folder for the files with the order of large epochs; None keeps all epochs in memory.
    Raises ValueError if all documents together do not fill one sample.
    """

    def __init__(
        self, sizes: NDArray[np.integer] | Sizes, length: int, seed: int, stream: str, overlap: int = 1,
        shuffle: bool = True, folder: str | None = None,
    ) -> None:  # fmt: skip
        self._sizes = sizes
        self._folder = folder
        self.length = length
        self.overlap = overlap
        self.shuffle = shuffle
        self.seed = [seed, *stream.encode()]
        tokens, self.documents, self._digest = self._read_sizes()
        self.per_epoch = max((tokens - overlap) // length, 0)
        if not self.per_epoch:
            raise ValueError(
                f"{tokens} tokens do not fill one sample of {length} + {overlap} tokens; "
                f"use a larger corpus or a smaller --seq-length"
            )
        self._epochs: OrderedDict[int, Epoch] = OrderedDict()
        self._latest = _NONE

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for worker processes; it omits the cached epochs, which workers recompute."""
        return {**self.__dict__, "_epochs": OrderedDict(), "_latest": _NONE}

    def sizes(self) -> NDArray[np.integer]:
        """Return the number of tokens of each document, int [documents]."""
        return self._sizes.read() if isinstance(self._sizes, Sizes) else self._sizes

    def _read_sizes(self) -> tuple[int, int, str]:
        """Return (number of tokens, number of documents, hash of all document lengths).

        The hash becomes part of the names of order files.
        """
        sizes = self.sizes()
        tokens = 0
        digest = hashlib.blake2b(digest_size=16)
        for piece in order_file.pieces(len(sizes)):
            tokens += int(sizes[piece].sum(dtype=np.int64))
            if self._folder:
                digest.update(sizes[piece].astype(np.int64).tobytes())
            if len(sizes) > SMALL:
                order_file.release_pages(sizes)
        return tokens, len(sizes), digest.hexdigest()

    def epoch(self, number: int) -> Epoch:
        """Return the order of epoch `number`, computed on first use."""
        if number == self._latest[0]:
            return self._latest[1]
        if number not in self._epochs:
            small = self.documents + self.per_epoch <= SMALL
            self._latest = _NONE  # free the memory of the previous epoch before the next epoch is allocated
            while len(self._epochs) >= (2 if small else 1):
                self._epochs.popitem(last=False)
            self._epochs[number] = self._in_memory(number) if small or not self._folder else self._in_file(number)
        self._epochs.move_to_end(number)
        self._latest = number, self._epochs[number]
        return self._latest[1]

    def release_pages(self) -> None:
        """Release the resident pages of the current epoch's order in this process, if the order is memory-mapped."""
        for array in self._latest[1]:
            order_file.release_pages(array)

    def _in_memory(self, number: int) -> Epoch:
        arrays = {name: np.empty(count, dtype) for name, (count, dtype) in self._shapes().items()}
        self._fill(number, arrays)
        return Epoch(arrays["order"], arrays["ends"], arrays["samples"])

    def _in_file(self, number: int) -> Epoch:
        assert self._folder
        try:
            made = order_file.map_arrays(
                self._folder, self._name(number), self._shapes(), lambda arrays: self._fill(number, arrays)
            )
        except OSError as error:
            where = "every process keeps a copy in memory; to save memory, set TMPDIR to a folder with free space"
            print(f"cannot write the sample order to a file ({error.strerror}), so {where}", file=sys.stderr)
            return self._in_memory(number)
        for array in made.values():
            order_file.release_pages(array)
        # The file of the epoch before the previous one is deleted, as an order file takes 12 or more bytes a document.
        order_file.remove(self._folder, self._name(number - 2))
        return Epoch(made["order"], made["ends"], made["samples"])

    def _name(self, number: int) -> str:
        """Return the name of the order file: a hash of everything that determines the order of epoch `number`."""
        facts = (self._digest, self.documents, self.length, self.overlap, self.shuffle, self.seed, number)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest() + ".order"

    def _shapes(self) -> order_file.Arrays:
        """Return length and dtype of the arrays of an epoch; dtype is int32 where it suffices, else int64."""

        def numbers(count: int) -> type[np.integer[Any]]:
            return np.int32 if count < 2**31 else np.int64

        documents = self.documents
        samples = self.per_epoch
        return {
            "ends": (documents, np.int64), "order": (documents, numbers(documents)),
            "samples": (samples, numbers(samples)),
        }  # fmt: skip

    def _fill(self, number: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Fill the arrays of an epoch without large temporary arrays."""
        sizes = self.sizes()
        order = arrays["order"]
        ends = arrays["ends"]
        self._permute(order, number, 0)
        self._permute(arrays["samples"], number, 1)
        total = 0
        for piece in order_file.pieces(len(order)):
            ends[piece] = total + np.cumsum(sizes[order[piece]], dtype=np.int64)
            total = int(ends[piece][-1])
        order_file.release_pages(sizes)

    def _permute(self, array: NDArray[Any], epoch: int, stream: int) -> None:
        for piece in order_file.pieces(len(array)):
            array[piece] = np.arange(piece.start, piece.stop)
        if self.shuffle:
            np.random.default_rng([*self.seed, epoch, stream]).shuffle(array)

    def places(self, first: int, count: int) -> NDArray[np.int64]:
        """Return a unique id for each sample from `first` to `first + count` - 1.

        The id is the number of samples that precede the sample in the concatenated text of all epochs.
        """
        found = np.empty(count, dtype=np.int64)
        at = 0
        while at < count:
            number, begin = divmod(first + at, self.per_epoch)
            take = min(count - at, self.per_epoch - begin)
            found[at : at + take] = self.epoch(number).samples[begin : begin + take]
            found[at : at + take] += number * self.per_epoch
            at += take
        return found

    def containing(self, documents: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Return the numbers of the samples of an epoch that contain tokens of `documents`, in ascending order."""
        order, ends, samples = self.epoch(epoch)
        place = _where_in(order, documents)
        stop = np.asarray(ends[place], np.int64)
        begin = np.where(place > 0, ends[place - 1], 0)
        stop, begin = stop[stop > begin], begin[stop > begin]
        # Sample j of the text, before the samples are shuffled, begins at token j * length.
        first = np.maximum((begin - self.length - self.overlap) // self.length + 1, 0)
        count = np.maximum(np.minimum((stop - 1) // self.length, self.per_epoch - 1) - first + 1, 0)
        inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return epoch * self.per_epoch + _where_in(samples, np.unique(np.repeat(first, count) + inside))

    def pieces(self, n: int) -> list[Piece]:
        """Return (document, first token, last token + 1) of each document in sample n, in order.

        n may be any number >= 0: sample `per_epoch` is the first sample of the second epoch.
        """
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        number, at = divmod(n, self.per_epoch)
        order, ends, samples = self.epoch(number)
        begin = samples.item(at) * self.length
        end = begin + self.length + self.overlap
        place = int(ends.searchsorted(begin, side="right"))
        base = ends.item(place - 1) if place else 0  # position of the first document in the text of the epoch
        skipped = begin - base
        found = []
        while base < end:
            stop = ends.item(place)
            if stop > base:
                found.append((order.item(place), 0, stop - base))
            base = stop
            place += 1
        # Correct the first and the last entry: of these two documents, the sample may contain only a part.
        document, _, stop = found[0]
        found[0] = document, skipped, stop
        document, start, stop = found[-1]
        found[-1] = document, start, stop - (base - end)
        return found


def _where_in(array: NDArray[Any], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices at which a large array has one of `values`, in ascending order."""
    found = [piece.start + np.flatnonzero(np.isin(array[piece], values)) for piece in order_file.pieces(len(array))]
    return np.concatenate(found, dtype=np.int64)

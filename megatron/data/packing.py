"""Packing of whole records, such as conversations, into windows of fixed length.

Best-fit decreasing (Krell et al. 2021) depends on the lengths of the records only. So it is computed once: it
determines which lengths share a window. Each epoch then permutes records of equal length and shuffles the windows.
So all epochs have the same number of windows, and window n is computed without its predecessors.
"""

import bisect
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def fit(lengths: Ints, capacity: int) -> Ints:
    """Return the window index of each record by best-fit decreasing, lengths [n] -> [n].

    lengths: number of positions of each record, from 1 to `capacity`, in descending order.
    capacity: number of positions of a window.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    open_: dict[int, list[int]] = {}  # number of free positions -> windows with this number of free positions
    rooms: list[int] = []  # keys of open_ whose list of windows is not empty, in ascending order
    opened = 0  # windows so far
    at = 0  # records so far

    def leave(room: int, windows: list[int]) -> None:
        if room and windows:
            if not open_.get(room):
                bisect.insort(rooms, room)
            open_.setdefault(room, []).extend(windows)

    kinds, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(kinds[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            place = bisect.bisect_left(rooms, length)
            room = rooms[place] if place < len(rooms) else capacity
            each = room // length  # each window takes as many records of this length as fit
            wanted = -(-count // each)
            if place < len(rooms):
                windows = open_[room][:wanted]
                del open_[room][: len(windows)]
                if not open_[room]:
                    del rooms[place]
            else:
                windows = list(range(opened, opened + wanted))
                opened += wanted
            taken = min(count, each * len(windows))
            window_of[at : at + taken] = np.repeat(windows, each)[:taken]
            last = taken - each * (len(windows) - 1)
            leave(room - each * length, windows[:-1])
            leave(room - last * length, windows[-1:])
            at += taken
            count -= taken
    return window_of


class PackedOrder:
    """Assignment of records to windows; the records of window n, for any n >= 0, depend only on n and the arguments.

    lengths: number of positions that each record occupies, [records]; 0 skips the record. capacity: number of positions
    of a window. stream: any string, used as part of the random seed; different strings give independent orders.
    Raises ValueError if all lengths are 0.
    Uses 24 bytes of memory per record, and 8 more bytes per record for each of the two cached epochs.
    """

    def __init__(self, lengths: Ints, capacity: int, seed: int, stream: str) -> None:
        self._records = np.flatnonzero(lengths)
        if not len(self._records):
            raise ValueError(
                f"none of {len(lengths)} records has a token that counts in the loss among its first --seq-length "
                "tokens"
            )
        self._lengths = lengths[self._records]
        window_of = fit(-np.sort(-self._lengths), capacity)
        self._places = np.argsort(window_of, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(window_of))])
        self.per_epoch = len(self._bounds) - 1
        self.filled = int(self._lengths.sum()) / (self.per_epoch * capacity)
        self.seed = [seed, *stream.encode()]
        self._epochs: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for worker processes; it omits the cached epochs, which workers recompute."""
        return {**self.__dict__, "_epochs": OrderedDict()}

    def _epoch(self, number: int) -> tuple[Ints, Ints]:
        """Return two arrays for epoch `number`: the record indices of all windows, and the order of the windows."""
        if number not in self._epochs:
            while len(self._epochs) > 1:
                self._epochs.popitem(last=False)
            mixed = np.random.default_rng([*self.seed, number, 0]).permutation(len(self._records))
            longest_first = mixed[np.argsort(-self._lengths[mixed], kind="stable")]
            windows = np.random.default_rng([*self.seed, number, 1]).permutation(self.per_epoch)
            self._epochs[number] = (self._records[longest_first[self._places]], windows)
        return self._epochs[number]

    def records(self, n: int) -> Ints:
        """Return the records of window n, longest first."""
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        number, at = divmod(n, self.per_epoch)
        records, windows = self._epoch(number)
        window = windows.item(at)
        return records[self._bounds.item(window) : self._bounds.item(window + 1)]

    def pieces(self, n: int) -> list[tuple[int, int, int]]:
        """Return (record, 0, number of its positions) of each record in window n, longest first."""
        records = self.records(n)
        lengths = self._lengths[np.searchsorted(self._records, records)]
        return [(record, 0, length) for record, length in zip(records.tolist(), lengths.tolist(), strict=True)]

    def containing(self, records: Ints, epoch: int) -> Ints:
        """Return the numbers of the windows of an epoch that contain one of `records`, in ascending order."""
        order, windows = self._epoch(epoch)
        found = self._bounds.searchsorted(np.flatnonzero(np.isin(order, records)), side="right") - 1
        return epoch * self.per_epoch + np.flatnonzero(np.isin(windows, found))

    def places(self, first: int, count: int) -> Ints:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a run share an id."""
        numbers, at = np.divmod(np.arange(first, first + count, dtype=np.int64), self.per_epoch)
        found = numbers * self.per_epoch
        for number in np.unique(numbers).tolist():
            found[numbers == number] += self._epoch(number)[1][at[numbers == number]]
        return found

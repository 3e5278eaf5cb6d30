"""Packing of whole records, such as conversations, into windows of fixed length.

Best-fit decreasing (Krell et al. 2021) depends on the lengths of the records only. So it is computed once: it
determines which lengths share a window. Each epoch then permutes records of equal length and shuffles the windows.
So all epochs have the same number of windows, and window n is computed without its predecessors.
"""

import bisect
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from .endless import CachesEpochs

Ints = NDArray[np.int64]


def assign_windows(lengths: Ints, capacity: int) -> Ints:
    """Return the window index of each record by best-fit decreasing, lengths [n] -> [n].

    lengths: number of positions of each record, from 1 to `capacity`, in descending order.
    capacity: number of positions of a window.
    """
    window_of = np.empty(len(lengths), dtype=np.int64)
    windows_by_space = dict[int, list[int]]()  # number of free positions -> windows with so many of them
    spaces = list[int]()  # keys of windows_by_space whose list is not empty, in ascending order
    num_windows = 0  # windows so far
    assigned = 0  # records so far

    def keep_open(space: int, windows: list[int]) -> None:
        """Record that `windows` have `space` free positions. Full windows (0) take no further records."""
        if space and windows:
            if not windows_by_space.get(space):  # no entry, or an empty list, whose key is not in `spaces`
                bisect.insort(spaces, space)
            windows_by_space.setdefault(space, []).extend(windows)

    # Records of equal length are placed together, the longest first.
    distinct_lengths, counts = np.unique(lengths, return_counts=True)
    for length, unplaced in zip(distinct_lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while unplaced:
            # Best fit: take the windows with the least space that is enough, or new ones if there are none.
            index = bisect.bisect_left(spaces, length)
            has_open_window = index < len(spaces)
            space = spaces[index] if has_open_window else capacity
            per_window = space // length  # each window takes as many records of this length as fit
            needed = -(-unplaced // per_window)  # rounded up
            if has_open_window:
                windows = windows_by_space[space][:needed]  # maybe fewer; the next round places the other records
                del windows_by_space[space][: len(windows)]
                if not windows_by_space[space]:
                    del spaces[index]
            else:
                windows = list(range(num_windows, num_windows + needed))
                num_windows += needed

            # Five records of length 4 in the new windows 6, 7 and 8 of 10 positions: each window takes two records, so
            # the records get the windows 6 6 7 7 8. Windows 6 and 7 keep 2 free positions, window 8 keeps 6.
            placed = min(unplaced, per_window * len(windows))
            window_of[assigned : assigned + placed] = np.repeat(windows, per_window)[:placed]
            in_last_window = placed - per_window * (len(windows) - 1)
            keep_open(space - per_window * length, windows[:-1])
            keep_open(space - in_last_window * length, windows[-1:])
            assigned += placed
            unplaced -= placed
    return window_of


class PackedOrder(CachesEpochs):
    """Assignment of records to windows; the records of window n, for any n >= 0, depend only on n and the arguments.

    lengths: number of positions that each record occupies, [records]; 0 skips the record. capacity: number of positions
    of a window. stream: any string, used as part of the random seed; different strings give independent orders.
    Raises ValueError if all lengths are 0.
    Uses 24 bytes of memory per record, and 8 more bytes per record for each of the two cached epochs.
    """

    def __init__(self, lengths: Ints, capacity: int, seed: int, stream: str) -> None:
        self._records = np.flatnonzero(lengths)  # indices of the records that are not skipped
        if not len(self._records):
            raise ValueError(
                f"none of {len(lengths)} records has a token that counts in the loss among its first --seq-length "
                "tokens"
            )
        self._lengths = lengths[self._records]
        # `window_of` lists the window of each record, the longest record first.
        window_of = assign_windows(-np.sort(-self._lengths), capacity)
        # Slot i is the place of the i-th longest record, in window window_of[i]. Records of equal length change their
        # slots from epoch to epoch. The slots of window w are _slots[_bounds[w] : _bounds[w + 1]]: with window_of =
        # 0 1 0, _slots is 0 2 1 and _bounds is 0 2 3, so window 0 has the slots 0 and 2.
        self._slots = np.argsort(window_of, kind="stable")
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(window_of))])
        self.per_epoch = len(self._bounds) - 1
        self.fill_fraction = int(self._lengths.sum()) / (self.per_epoch * capacity)
        self.seed = [seed, *stream.encode()]  # numpy seeds a generator with a list of integers
        self._epochs: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()  # results of `_epoch` by number, at most two

    def _epoch(self, number: int) -> tuple[Ints, Ints]:
        """Return two arrays for epoch `number`: the record indices of all windows, and the order of the windows."""
        epochs = self._epochs
        if number not in epochs:
            while len(epochs) > 1:  # keep one other epoch, the newest
                epochs.popitem(last=False)
            # The last number of a seed, 0 or 1, makes the two generators independent.
            record_rng = np.random.default_rng([*self.seed, number, 0])
            shuffled = record_rng.permutation(len(self._records))
            # The stable sort keeps records of equal length in random order. Records 2 0 1 of lengths 5 5 7
            # become 1 2 0.
            longest_first = shuffled[np.argsort(-self._lengths[shuffled], kind="stable")]
            window_rng = np.random.default_rng([*self.seed, number, 1])
            windows = window_rng.permutation(self.per_epoch)
            epochs[number] = (self._records[longest_first[self._slots]], windows)
        return epochs[number]

    def records(self, n: int) -> Ints:
        """Return the records of window n, longest first."""
        if n < 0:
            raise IndexError(f"sample {n} is negative")
        epoch, position = divmod(n, self.per_epoch)
        records, windows = self._epoch(epoch)
        window = windows.item(position)
        return records[self._bounds.item(window) : self._bounds.item(window + 1)]

    def pieces(self, n: int) -> list[tuple[int, int, int]]:
        """Return (record, 0, number of its positions) of each record in window n, longest first."""
        records = self.records(n)
        lengths = self._lengths[np.searchsorted(self._records, records)]
        return [(record, 0, length) for record, length in zip(records.tolist(), lengths.tolist(), strict=True)]

    def containing(self, records: Ints, epoch: int) -> Ints:
        """Return the numbers of the windows of an epoch that contain one of `records`, in ascending order."""
        order, windows = self._epoch(epoch)
        places = np.flatnonzero(np.isin(order, records))
        matching_windows = self._bounds.searchsorted(places, side="right") - 1  # bounds 0 2 3: place 2 is in window 1
        return epoch * self.per_epoch + np.flatnonzero(np.isin(windows, matching_windows))

    def sample_ids(self, first: int, count: int) -> Ints:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a run share an id."""
        epochs, positions = np.divmod(np.arange(first, first + count, dtype=np.int64), self.per_epoch)
        # Position p of epoch e has window w of the epoch; its id is e * per_epoch + w.
        ids = epochs * self.per_epoch
        for epoch in np.unique(epochs).tolist():
            is_in_epoch = epochs == epoch
            _, windows = self._epoch(epoch)
            ids[is_in_epoch] += windows[positions[is_in_epoch]]
        return ids

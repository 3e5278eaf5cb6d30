"""The reverse of the sample order: which samples contain given documents."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pages import slices_of
from .sample_order import SampleOrder

Numbers = NDArray[np.int64]


def samples_containing(made: SampleOrder, documents: Numbers, epoch: int) -> Numbers:
    """Return the numbers of the samples of an epoch that contain tokens of `documents`, in ascending order."""
    order, ends, samples = made.epoch(epoch)
    place = _where_in(order, documents)
    stop = np.asarray(ends[place], np.int64)
    begin = np.where(place > 0, ends[place - 1], 0)
    is_filled = stop > begin
    found = _windows_over(made, begin[is_filled], stop[is_filled])
    return epoch * made.per_epoch + _where_in(samples, found)


def _windows_over(made: SampleOrder, begin: Numbers, stop: Numbers) -> Numbers:
    """Return the numbers of the windows that contain one of the tokens `begin` to `stop` - 1 of the text, ascending.

    Window j begins at token j * length. With a length of 10 and an overlap of 1, tokens 25 to 31 are in the windows 2
    (tokens 20 to 30) and 3 (tokens 30 to 40).
    """
    length = made.length
    first = np.maximum((begin - length - made.overlap) // length + 1, 0)
    last = np.minimum((stop - 1) // length, made.per_epoch - 1)
    count = np.maximum(last - first + 1, 0)
    # The ranges one after another: first 2 and 7, count 2 and 3 give 2 3 7 8 9.
    inside = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.unique(np.repeat(first, count) + inside)


def _where_in(array: NDArray[Any], values: Numbers) -> Numbers:
    """Return the indices at which a large array has one of `values`, in ascending order."""
    found = [piece.start + np.flatnonzero(np.isin(array[piece], values)) for piece in slices_of(len(array))]
    return np.concatenate(found, dtype=np.int64)

"""The reverse of the sample order: which samples contain given documents."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pages import slices_of
from .sample_order import SampleOrder

Numbers = NDArray[np.int64]


def samples_containing(sample_order: SampleOrder, documents: Numbers, epoch: int) -> Numbers:
    """Return the numbers of the samples of an epoch that contain tokens of `documents`, in ascending order."""
    order, ends, samples = sample_order.epoch(epoch)
    positions = _find_indices(order, documents)  # the text has document order[i] in position i
    end = np.asarray(ends[positions], np.int64)
    # A document begins where the one before it ends, the first document at 0.
    begin = np.where(positions > 0, ends[positions - 1], 0)
    is_filled = end > begin  # empty documents are in no window
    windows = _windows_over(sample_order, begin[is_filled], end[is_filled])
    # Sample i of the epoch is window samples[i].
    return epoch * sample_order.per_epoch + _find_indices(samples, windows)


def _windows_over(sample_order: SampleOrder, begin: Numbers, end: Numbers) -> Numbers:
    """Return the numbers of the windows that contain one of the tokens `begin` to `end` - 1 of the text, ascending.

    Window j begins at token j * length. With a length of 10 and an overlap of 1, tokens 25 to 31 are in the windows 2
    (tokens 20 to 30) and 3 (tokens 30 to 40).
    """
    length = sample_order.length
    # Window j has the tokens from j * length to (j + 1) * length + overlap - 1. Window `first` is the first one whose
    # last token is not before `begin`, `last` the last one whose first token is before `end`.
    first = np.maximum((begin - length - sample_order.overlap) // length + 1, 0)
    last = np.minimum((end - 1) // length, sample_order.per_epoch - 1)
    count = np.maximum(last - first + 1, 0)  # 0 for a document among the last tokens, which fill no window
    # The ranges one after another: first 2 and 7, count 2 and 3 give 2 3 7 8 9.
    count_before = np.cumsum(count) - count
    offsets = np.arange(int(count.sum())) - np.repeat(count_before, count)
    return np.unique(np.repeat(first, count) + offsets)


def _find_indices(array: NDArray[Any], values: Numbers) -> Numbers:
    """Return the indices at which a large array has one of `values`, in ascending order."""
    indices = [piece.start + np.flatnonzero(np.isin(array[piece], values)) for piece in slices_of(len(array))]
    return np.concatenate(indices, dtype=np.int64)

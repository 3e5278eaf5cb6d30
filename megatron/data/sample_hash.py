"""Hash of the samples that a run has read and of their order.

It is a polynomial hash over the sample ids, modulo 2^64. The hash does not depend on the batch size or on the
distribution of samples over ranks. It can be extended sample by sample.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BASE = np.uint64(0x9E3779B97F4A7C15)
SAMPLES_AT_ONCE = 1 << 18


def extend_hash(state: int, dataset: Any, first: int, count: int) -> int:
    """Return the hash of samples 0 to `first + count` - 1, given the hash `state` of samples 0 to `first` - 1.

    dataset: `dataset.sample_ids(first, count)` returns the sample ids. Without this method, the id of sample n is n.
    """
    sample_ids = getattr(dataset, "sample_ids", None)
    if not callable(sample_ids):  # a custom data set may have an attribute of this name
        sample_ids = _indices
    for begin in range(first, first + count, SAMPLES_AT_ONCE):
        length = min(SAMPLES_AT_ONCE, first + count - begin)
        # Ids a b c extend the state s to s * BASE^3 + a * BASE^2 + b * BASE + c, all modulo 2^64.
        powers = np.full(length + 1, BASE)
        powers[0] = 1
        powers = np.cumprod(powers, dtype=np.uint64)  # BASE^0 ... BASE^length
        factors = np.flip(powers[:-1])  # BASE^(length - 1) ... BASE^0
        terms = _mix(sample_ids(begin, length).astype(np.uint64)) * factors
        total = int(terms.sum(dtype=np.uint64))
        state = (state * int(powers[-1]) + total) % 2**64
    return state


def _indices(first: int, count: int) -> NDArray[np.int64]:
    """Return the ids of `count` samples from number `first` on, where the id of sample n is n."""
    return np.arange(first, first + count)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finalizer (Steele et al. 2014), so that nearby ids hash to unrelated numbers."""
    x = x + BASE
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

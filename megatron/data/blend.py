"""Several corpora as one, in given proportions: at any moment each has given its share, to within one sample.

The shares become whole numbers of samples of a block (0.7 and 0.3: 7 and 3 of 10), and every block
takes them in the same order: of the corpora that are due, the one whose next sample must come soonest.
That such an order exists for any shares, with less than one sample of deviation everywhere, is shown
by Steiner and Yeomans (1993). So which corpus sample n comes from is a look-up, and depends on nothing else.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

LARGEST_BLOCK = 1 << 16


def quotas(weights: Sequence[float | str]) -> list[int]:
    """Samples of each corpus in a block: exact for weights of few digits, else to the nearest 1/65536, at least one."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    common = math.lcm(*((weight / total).denominator for weight in exact))
    if common <= LARGEST_BLOCK:
        return [int(weight / total * common) for weight in exact]
    counts = [max(1, round(weight / total * LARGEST_BLOCK)) for weight in exact]
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


def order_of(counts: Sequence[int]) -> NDArray[np.int32]:
    """[sum of counts] which corpus each sample of a block comes from: earliest deadline first."""
    block = sum(counts)
    # Sample k of a corpus with q of them may come from time k * block / q on, and must before (k + 1) * block / q.
    arrivals = [(0, i, 0) for i in range(len(counts))]
    due: list[tuple[int, int, int]] = []
    found = np.empty(block, dtype=np.int32)
    for now in range(block):
        while arrivals and arrivals[0][0] <= now:
            _, i, k = heapq.heappop(arrivals)
            heapq.heappush(due, (-(-(k + 1) * block // counts[i]), i, k))
        _, i, k = heapq.heappop(due)
        found[now] = i
        if k + 1 < counts[i]:
            heapq.heappush(arrivals, ((k + 1) * block // counts[i], i, k + 1))
    return found


class BlendedDataset(Dataset[dict[str, Tensor]]):
    """`dataset[n]`, for any n >= 0, is the next sample of one of `datasets`. weights: their proportions."""

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float | str]) -> None:
        if len(datasets) != len(weights) or not all(float(weight) > 0 for weight in weights):
            raise ValueError("a blend needs a positive weight for each corpus")
        self.datasets = list(datasets)
        self.plan = getattr(datasets[0], "plan", None)  # T5's lengths, which all share
        self.quotas = quotas(weights)
        self.block = sum(self.quotas)
        self._which = order_of(self.quotas)
        self._nth = np.empty(self.block, dtype=np.int32)
        for i, quota in enumerate(self.quotas):
            self._nth[self._which == i] = np.arange(quota)

    def locate(self, n: int) -> tuple[int, int]:
        """(which corpus, which of its samples)."""
        block, at = divmod(int(n), self.block)
        which = int(self._which[at])
        return which, block * self.quotas[which] + int(self._nth[at])

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        which, k = self.locate(n)
        sample: dict[str, Tensor] = self.datasets[which][k]
        return sample

    def places(self, first: int, count: int) -> NDArray[np.int64]:
        """What tells samples `first` to `first + count` from all others; see sample_order.py."""
        block, at = np.divmod(np.arange(first, first + count), self.block)
        which = self._which[at]
        found = np.empty(count, dtype=np.int64)
        for i, dataset in enumerate(self.datasets):
            mine = np.flatnonzero(which == i)
            if len(mine):
                k = block[mine] * self.quotas[i] + self._nth[at[mine]]  # consecutive numbers
                found[mine] = dataset.places(int(k[0]), len(k)) * len(self.datasets) + i
        return found

    @property
    def samples_per_epoch(self) -> int:
        """Samples until the first corpus begins anew."""
        pairs = zip(self.datasets, self.quotas, strict=True)
        return min(int(dataset.samples_per_epoch) * self.block // quota for dataset, quota in pairs)

"""Blend of several corpora: at any point of a run, each corpus is within one sample of its share in a block.

The blend repeats a block in which each corpus has a whole number of samples. For weights 0.7 and 0.3, a block has 7
samples of the first corpus and 3 of the second. Earliest-deadline-first scheduling orders the samples of a block.
Steiner and Yeomans (1993) prove that an order with a deviation below one sample exists for any shares. The block is
stored as a table that maps a position in the block to a corpus.

The weights may have too many digits for an exact block. Then the block has about LARGEST_BLOCK samples, and corpora
with fewer than FEW samples in it form a second blend. If w is the total share of these corpora, sample n is taken from
the second blend whenever floor((n + 1) w) > floor(n w), else from the block.
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
# A corpus with fewer samples than this in a block of LARGEST_BLOCK samples goes to the second blend. Rounding the
# number of its samples to an integer could change its share by about 1% or more.
FEW = 64


def shares_of(weights: Sequence[float | str]) -> list[Fraction]:
    """Return the exact share of each corpus; the shares sum to 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def _exact_block(shares: Sequence[Fraction]) -> int:
    """Return the number of samples of the smallest block with exact shares: 10 for shares of 7/10 and 3/10."""
    return math.lcm(*(share.denominator for share in shares))


def quotas(weights: Sequence[float | str]) -> list[int]:
    """Return the number of samples of each corpus in a block.

    The shares are exact if a block of at most LARGEST_BLOCK samples can represent them. Else they are rounded: with n
    corpora, a share changes by at most (n + 1) / (2 LARGEST_BLOCK).
    """
    shares = shares_of(weights)
    block = _exact_block(shares)
    if block <= LARGEST_BLOCK:
        return [int(share * block) for share in shares]
    counts = [max(1, round(share * LARGEST_BLOCK)) for share in shares]
    divisor = math.gcd(*counts)
    return [count // divisor for count in counts]


def rare(weights: Sequence[float | str]) -> list[int]:
    """Return the indices of the rare corpora: their share is too small for a block, so they form a second blend."""
    shares = shares_of(weights)
    if _exact_block(shares) <= LARGEST_BLOCK:
        return []
    counts = [share * LARGEST_BLOCK for share in shares]
    least = FEW if max(counts) >= FEW else Fraction(1, 2)
    return [i for i, count in enumerate(counts) if count < least]


def order_of(counts: Sequence[int]) -> NDArray[np.int32]:
    """Return the corpus index of each sample of a block, [sum of counts], by earliest-deadline-first scheduling.

    counts: number of samples of each corpus in the block.
    """
    block = sum(counts)
    # Sample k of a corpus with q samples per block must be at a position from k * block / q (rounded down) to
    # (k + 1) * block / q (rounded up) - 1. The second bound is the deadline.
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
    """Blend that draws its samples from `datasets` in proportion to `weights`.

    Sample n exists for any n >= 0. The samples of each dataset keep the order that they have in that dataset.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float | str]) -> None:
        if len(datasets) != len(weights) or not all(float(weight) > 0 for weight in weights):
            raise ValueError("a blend needs a positive weight for each corpus")
        self.datasets = list(datasets)
        self.plan = getattr(datasets[0], "plan", None)  # T5 only: sequence lengths, the same for all datasets
        self._rare_ones = rare(weights)
        self._common_ones = [i for i in range(len(weights)) if i not in self._rare_ones]
        self._rare: BlendedDataset | None = None
        self._share = Fraction(0)  # share of the rare corpora in total
        if self._rare_ones:
            shares = shares_of(weights)
            self._share = sum((shares[i] for i in self._rare_ones), Fraction(0))
            self._rare = BlendedDataset([datasets[i] for i in self._rare_ones], [weights[i] for i in self._rare_ones])
        self.quotas = quotas([weights[i] for i in self._common_ones])
        self.block = sum(self.quotas)
        self._which = order_of(self.quotas)
        self._nth = np.empty(self.block, dtype=np.int32)  # number of each sample of the block in its corpus
        for i, quota in enumerate(self.quotas):
            self._nth[self._which == i] = np.arange(quota)

    def locate(self, n: int) -> tuple[int, int]:
        """Return (corpus index, sample index in that corpus) for sample n of the blend."""
        n = int(n)
        before = math.floor(n * self._share)  # samples of rare corpora among samples 0 to n - 1 of the blend
        if self._rare and math.floor((n + 1) * self._share) > before:
            which, k = self._rare.locate(before)
            return self._rare_ones[which], k
        block, at = divmod(n - before, self.block)
        which = self._which.item(at)
        return self._common_ones[which], block * self.quotas[which] + self._nth.item(at)

    def consumed(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each corpus."""
        rare_samples = math.floor(samples * self._share)
        blocks, rest = divmod(samples - rare_samples, self.block)
        begun = np.bincount(self._which[:rest], minlength=len(self.quotas)).tolist()
        counts = [0] * len(self.datasets)
        for corpus, quota, more in zip(self._common_ones, self.quotas, begun, strict=True):
            counts[corpus] = blocks * quota + more
        if self._rare:
            for corpus, count in zip(self._rare_ones, self._rare.consumed(rare_samples), strict=True):
                counts[corpus] = count
        return counts

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        which, k = self.locate(n)
        sample: dict[str, Tensor] = self.datasets[which][k]
        return sample

    def places(self, first: int, count: int) -> NDArray[np.int64]:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a run share an id."""
        owners, numbers = self.locate_all(first, count)
        found = np.empty(count, dtype=np.int64)
        for i, dataset in enumerate(self.datasets):
            mine = np.flatnonzero(owners == i)
            if len(mine):
                # places() takes a contiguous range: the samples that this part of the blend takes from one corpus are
                # contiguous in that corpus.
                k = numbers[mine]
                found[mine] = dataset.places(int(k[0]), len(k)) * len(self.datasets) + i
        return found

    def locate_all(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (corpus indices [count], sample indices in these corpora [count]) of `count` samples from `first`."""
        begin = math.floor(first * self._share)
        end = math.floor((first + count) * self._share)
        # Sample r of the rare corpora is sample ceil((r + 1) / share) - 1 of the blend: with a share of 1/4, samples 3,
        # 7, 11 and so on are rare.
        taken = np.array([math.ceil(r / self._share) - 1 - first for r in range(begin + 1, end + 1)], dtype=np.int64)
        common = np.ones(count, dtype=np.bool_)
        common[taken] = False
        owners = np.empty(count, np.int64)
        numbers = np.empty(count, np.int64)
        if self._rare and len(taken):
            which, numbers[taken] = self._rare.locate_all(begin, len(taken))
            owners[taken] = np.array(self._rare_ones)[which]
        begin = first - begin
        block, at = np.divmod(np.arange(begin, begin + count - len(taken)), self.block)
        inner = self._which[at]
        owners[common] = np.array(self._common_ones)[inner]
        numbers[common] = block * np.array(self.quotas)[inner] + self._nth[at]
        return owners, numbers

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the blend until one of the corpora has been read completely."""
        ends = []
        for corpus, quota in zip(self._common_ones, self.quotas, strict=True):
            ends.append(int(self.datasets[corpus].samples_per_epoch) * self.block // quota)
        if not self._rare:
            return min(ends)
        return int(min(min(ends) / (1 - self._share), self._rare.samples_per_epoch / self._share))

"""Blend of several corpora: at any point of a run, each corpus is within one sample of its share in a block.

The blend repeats a block in which each corpus has a whole number of samples. For weights 0.7 and 0.3, a block has 7
samples of the first corpus and 3 of the second. Earliest-deadline-first scheduling orders the samples of a block.
Steiner and Yeomans (1993) prove that an order with a deviation below one sample exists for any shares. The block is
stored as a table that maps a position in the block to a corpus.

The weights may have too many digits for an exact block. Then the block has about LARGEST_BLOCK samples, and corpora
with fewer than MIN_BLOCK_SAMPLES samples in it form a second blend. If w is the total share of these corpora, sample n
is taken from the second blend whenever floor((n + 1) w) > floor(n w), else from the block. If all of more than 1,024
corpora have so few samples, the block grows, and those with less than half of the mean share form the second blend.

`blend_sets` and `blend_training_set` combine the data sets of corpora into those of a run.
"""

import copy
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from .corpus_dataset import CorpusDataset, WrappedDataset
from .corpus_paths import Paths, stages_in
from .fingerprints import corpus_fingerprint

LARGEST_BLOCK = 1 << 16
# A corpus with fewer samples than this in a block of LARGEST_BLOCK samples goes to the second blend. Rounding the
# number of its samples to an integer could change its share by about 1% or more.
MIN_BLOCK_SAMPLES = 64


def shares_of(weights: Sequence[float | str]) -> list[Fraction]:
    """Return the exact share of each corpus; the shares sum to 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    return [weight / total for weight in exact]


def _exact_block_size(shares: Sequence[Fraction]) -> int:
    """Return the number of samples of the smallest block with exact shares: 10 for shares of 7/10 and 3/10."""
    return math.lcm(*(share.denominator for share in shares))


def block_quotas(weights: Sequence[float | str]) -> list[int]:
    """Return the number of samples of each corpus in a block.

    The shares are exact if a block of at most LARGEST_BLOCK samples can represent them. Else they are rounded: with n
    corpora, a share changes by at most (n + 1) / (2 LARGEST_BLOCK).
    """
    shares = shares_of(weights)
    counts = _rounded_counts(shares, min(_exact_block_size(shares), LARGEST_BLOCK))
    # Of more than 1,024 corpora, all may be too rare for this block. Then it grows until the rarest has enough samples.
    if not _are_close(counts, shares):
        block = math.ceil(MIN_BLOCK_SAMPLES / min(shares))
        block = max(block, LARGEST_BLOCK)
        counts = _rounded_counts(shares, block)
    divisor = math.gcd(*counts)  # a block with the counts 6 and 4 repeats a block with 3 and 2
    return [count // divisor for count in counts]


def _rounded_counts(shares: Sequence[Fraction], block: int) -> list[int]:
    return [max(1, round(share * block)) for share in shares]


def _are_close(counts: Sequence[int], shares: Sequence[Fraction]) -> bool:
    """Return whether each corpus has its share in a block with these numbers of samples, to within 1% of the share."""
    block = sum(counts)
    for count, share in zip(counts, shares, strict=True):
        exact = share * block
        if abs(count - exact) > exact / 100:
            return False
    return True


def rare_corpora(weights: Sequence[float | str]) -> list[int]:
    """Return the indices of the rare corpora: their share is too small for a block, so they form a second blend."""
    shares = shares_of(weights)
    if _exact_block_size(shares) <= LARGEST_BLOCK:  # a block has exact shares, however small they are
        return []
    threshold = Fraction(MIN_BLOCK_SAMPLES, LARGEST_BLOCK)
    if max(shares) < threshold:  # more than 1,024 corpora, all below the threshold
        if _are_close(_rounded_counts(shares, LARGEST_BLOCK), shares):  # the block is exact enough
            return []
        threshold = Fraction(1, 2 * len(shares))  # half of the mean share
    return [i for i, share in enumerate(shares) if share < threshold]


def order_block(counts: Sequence[int]) -> NDArray[np.int32]:
    """Return the corpus index of each sample of a block, [sum of counts], by earliest-deadline-first scheduling.

    counts: number of samples of each corpus in the block.
    """
    block_size = sum(counts)
    # Sample k of a corpus with q samples per block must be at or after position k * block_size / q (rounded down), and
    # before its deadline, position (k + 1) * block_size / q (rounded up).
    # At each position, the samples that may have it move from the heap `arrivals` to the heap `due`, and the sample
    # with the earliest deadline is taken from `due`. The smallest entry of a heap is at index 0.
    arrivals = [(0, corpus, 0) for corpus in range(len(counts))]  # (first position, corpus, number of its sample)
    due: list[tuple[int, int, int]] = []  # (deadline, corpus, number of its sample)
    order = np.empty(block_size, np.int32)
    for now in range(block_size):
        while arrivals and arrivals[0][0] <= now:
            _, corpus, number = heapq.heappop(arrivals)
            deadline = -(-(number + 1) * block_size // counts[corpus])  # rounded up
            heapq.heappush(due, (deadline, corpus, number))
        _, corpus, number = heapq.heappop(due)
        order[now] = corpus
        if number + 1 < counts[corpus]:
            heapq.heappush(arrivals, ((number + 1) * block_size // counts[corpus], corpus, number + 1))
    return order


class BlendedDataset(Dataset[dict[str, Tensor]]):
    """Blend that draws its samples from `datasets` in proportion to `weights`.

    Sample n exists for any n >= 0. The samples of each dataset keep the order that they have in that dataset.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float | str]) -> None:
        if len(datasets) != len(weights) or not all(float(weight) > 0 for weight in weights):
            raise ValueError("a blend needs a positive weight for each corpus")
        self.datasets = list(datasets)
        self.plan = getattr(datasets[0], "plan", None)  # T5 only: sequence lengths, the same for all datasets
        self._rare_indices = rare_corpora(weights)
        self._common_indices = []
        self._rare_share = Fraction(0)  # share of the rare corpora in total
        common_weights = []
        rare_weights = []
        rare_datasets = []
        for i, share in enumerate(shares_of(weights)):
            if i in self._rare_indices:
                self._rare_share += share
                rare_weights.append(weights[i])
                rare_datasets.append(datasets[i])
            else:
                self._common_indices.append(i)
                common_weights.append(weights[i])
        self._rare_blend: BlendedDataset | None = None
        if rare_datasets:
            self._rare_blend = BlendedDataset(rare_datasets, rare_weights)
        self.quotas = block_quotas(common_weights)
        self.block_size = sum(self.quotas)
        # Tables of a block by position: index of the corpus in _common_indices, and number of the sample among those of
        # its corpus in the block. A block with the corpora 0 0 1 0 has the numbers 0 1 0 2.
        self._corpus_at = order_block(self.quotas)
        self._number_at = np.empty(self.block_size, dtype=np.int32)
        for i, quota in enumerate(self.quotas):
            self._number_at[self._corpus_at == i] = np.arange(quota)

    def locate(self, n: int) -> tuple[int, int]:
        """Return (corpus index, sample index in that corpus) for sample n of the blend."""
        n = int(n)
        # Of samples 0 to n - 1 of the blend, floor(n * share) are of rare corpora. Sample n is of one, too, if this
        # number grows with it: with a share of 1/4, it grows at samples 3, 7, 11 and so on.
        rare_before = math.floor(n * self._rare_share)
        rare_with_n = math.floor((n + 1) * self._rare_share)
        if self._rare_blend and rare_with_n > rare_before:
            corpus, number = self._rare_blend.locate(rare_before)
            return self._rare_indices[corpus], number
        block, position = divmod(n - rare_before, self.block_size)
        corpus = self._corpus_at.item(position)
        number = block * self.quotas[corpus] + self._number_at.item(position)
        return self._common_indices[corpus], number

    def consumed_per_corpus(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each corpus."""
        rare_samples = math.floor(samples * self._rare_share)
        blocks, remainder = divmod(samples - rare_samples, self.block_size)
        # The last, incomplete block has only its first `remainder` samples.
        partial_counts = np.bincount(self._corpus_at[:remainder], minlength=len(self.quotas)).tolist()
        counts = [0] * len(self.datasets)
        for corpus, quota, partial_count in zip(self._common_indices, self.quotas, partial_counts, strict=True):
            counts[corpus] = blocks * quota + partial_count
        if self._rare_blend:
            rare_counts = self._rare_blend.consumed_per_corpus(rare_samples)
            for corpus, count in zip(self._rare_indices, rare_counts, strict=True):
                counts[corpus] = count
        return counts

    def __getitem__(self, n: int) -> dict[str, Tensor]:
        corpus, number = self.locate(n)
        return self.datasets[corpus][number]  # type: ignore[no-any-return]

    def sample_ids(self, first: int, count: int) -> NDArray[np.int64]:
        """Return an id for each sample from `first` to `first + count` - 1; no two samples of a run share an id."""
        corpora, numbers = self.locate_all(first, count)
        ids = np.empty(count, np.int64)
        by_corpus = np.argsort(corpora, kind="stable")  # the positions of corpus 0 in order, then those of corpus 1
        ends = np.cumsum(np.bincount(corpora, minlength=len(self.datasets)))
        for i, (dataset, positions) in enumerate(zip(self.datasets, np.split(by_corpus, ends[:-1]), strict=True)):
            if len(positions):
                # sample_ids() takes a contiguous range: the samples that this part of the blend takes from one corpus
                # are contiguous in that corpus. Of 3 corpora, the ids of corpus 1 become 1, 4, 7 and so on.
                first_number = int(numbers[positions[0]])
                ids[positions] = dataset.sample_ids(first_number, len(positions)) * len(self.datasets) + i
        return ids

    def locate_all(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (corpus indices [count], sample indices in these corpora [count]) of `count` samples from `first`."""
        # Example: samples 5 to 8, if a share of 1/4 is rare, which are samples 3, 7, 11 and so on. Then rare_begin is 1
        # and rare_end is 2: the only rare sample is number 1, at position 2, and the others are common samples 4, 5, 6.
        rare_begin = math.floor(first * self._rare_share)
        rare_end = math.floor((first + count) * self._rare_share)
        # Sample r of the rare corpora is sample ceil((r + 1) / share) - 1 of the blend, with r + 1 = `number`. A share
        # of 2/7 gives -(-number * 7 // 2), which rounds up. Fractions would take ten times as long.
        parts = self._rare_share.numerator
        whole = self._rare_share.denominator
        positions = [-(-number * whole // parts) - 1 - first for number in range(rare_begin + 1, rare_end + 1)]
        rare_positions = np.array(positions, np.int64)
        is_common = np.ones(count, dtype=np.bool_)
        is_common[rare_positions] = False
        corpora = np.empty(count, np.int64)
        numbers = np.empty(count, np.int64)
        if self._rare_blend and len(rare_positions):
            rare_corpus, rare_numbers = self._rare_blend.locate_all(rare_begin, len(rare_positions))
            numbers[rare_positions] = rare_numbers
            corpora[rare_positions] = np.array(self._rare_indices)[rare_corpus]
        # The other samples are consecutive in the repeated block.
        common_begin = first - rare_begin
        block, position = np.divmod(np.arange(common_begin, first + count - rare_end), self.block_size)
        corpus_in_block = self._corpus_at[position]
        corpora[is_common] = np.array(self._common_indices)[corpus_in_block]
        numbers[is_common] = block * np.array(self.quotas)[corpus_in_block] + self._number_at[position]
        return corpora, numbers

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the blend until one of the corpora has been read completely."""
        common_ends = []  # for each common corpus, the number of common samples until it has been read completely
        for corpus, quota in zip(self._common_indices, self.quotas, strict=True):
            corpus_size = int(self.datasets[corpus].samples_per_epoch)
            common_ends.append(corpus_size * self.block_size // quota)
        if not self._rare_blend:
            return min(common_ends)
        # Of n samples of the blend, n * _rare_share come from rare corpora and the others from common ones. So r rare
        # samples are among the first r / _rare_share samples of the blend.
        rare_end = self._rare_blend.samples_per_epoch / self._rare_share
        common_end = min(common_ends) / (1 - self._rare_share)
        return int(min(common_end, rare_end))


class Member(NamedTuple):
    """The data set of one corpus in one part of the run, and the weight of the corpus in its blend."""

    weight: str | None
    prefix: str
    dataset: Any


NamedSets = dict[str, list[Member]]  # name of a data set, "" without names -> its corpora


class NumberedCorpus(WrappedDataset):
    """Data set of one of several corpora. Its samples also have "corpus", the number of the corpus, int64 scalar."""

    def __init__(self, dataset: Any, number: int) -> None:
        super().__init__(dataset)
        self._number = number  # not a tensor, which data workers would share through an open file each

    def __getitem__(self, n: int) -> dict[str, Any]:
        return {**self.dataset[n], "corpus": torch.tensor(self._number)}


def label_corpus(dataset: Any, prefix: str, prefixes: Sequence[str]) -> Any:
    """Return the data set with its prefix and, if there are several corpora, with the number of its corpus."""
    if isinstance(dataset, CorpusDataset):
        dataset.prefix = prefix
    return NumberedCorpus(dataset, prefixes.index(prefix)) if len(prefixes) > 1 else dataset


def with_own_draws(dataset: Any) -> Any:
    """Return a copy of a corpus's data set whose random choices also depend on the content of the corpus.

    Without it, sample n of each corpus of a blend draws the same random numbers, and a batch has many such samples.
    """
    own = copy.copy(dataset)
    if isinstance(dataset, NumberedCorpus):
        own.dataset = with_own_draws(dataset.dataset)
    elif isinstance(dataset, CorpusDataset) and dataset.seed:
        own.seed = [*dataset.seed, int(corpus_fingerprint(dataset.prefix), 16)]
    return own


def blend_training_set(sets: NamedSets, paths: Paths) -> Any:
    """Return the training data set: the blend of the corpora of `paths`, or one that changes at each data stage."""
    stages = stages_in(paths)
    if not stages:
        return blend_sets(sets)
    from .staged import build_staged

    trained = {member.prefix: member.dataset for member in sets[""]}  # training data have no name
    return build_staged(trained, stages, tokens_of(sets[""][0].dataset))


def tokens_of(dataset: Any) -> int:
    """Return the number of tokens of a sample: of encoder and decoder for T5, else of one window."""
    plan = getattr(dataset, "plan", None)
    return plan.encoder + plan.decoder if plan is not None else int(dataset.seq_length)


def blend_sets(sets: NamedSets) -> Any:
    """Return a data set, a dict from names to data sets if they are named, or None."""
    blends = {name: _blend(members) for name, members in sets.items()}
    return blends.get("") or blends or None


def _blend(members: Sequence[Member]) -> Any:
    """Return a blend of corpora, which without weights count by their numbers of samples, or the only corpus."""
    if len(members) == 1:
        return members[0].dataset
    datasets = [with_own_draws(member.dataset) for member in members]
    weights = [member.weight or str(member.dataset.samples_per_epoch) for member in members]
    return BlendedDataset(datasets, weights)

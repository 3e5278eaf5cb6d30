"""Detection of near duplicates by MinHash (Broder 1997) and locality-sensitive hashing (Indyk and Motwani 1998).

A signature has HASHES numbers. The share of equal numbers in two signatures estimates the Jaccard similarity of two
texts, with a standard deviation of sqrt(J (1 - J) / HASHES). Bands of a few numbers find candidates: texts with one
equal band. The estimate then decides.

A worked example for a similarity of 0.8: with 6 numbers a band, a band of two texts is equal with probability
0.8^6 = 0.26, so at least one of 21 bands is equal with probability 1 - 0.74^21 = 0.998. The estimate has a standard
deviation of 0.035, and 0.8 - 1.75 x 0.035 = 0.738 is reached with probability 0.96.

Shapes: b bands, r numbers of a band.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.packages import pip_install

HASHES = 128
MIN_RECALL = 0.99  # smallest probability with which a text of exactly the wanted similarity becomes a candidate
DEVIATIONS = 1.75  # standard deviations by which an estimate may fall short of the wanted similarity
MAX_PER_BAND = 16  # texts that share a band and are compared; others with the same band are found by other bands
BLOCK_ROWS = 1 << 16  # signatures of a block of memory
MAX_LOAD = 0.7  # share of used slots at which the table grows
EMPTY = np.uint32(0xFFFFFFFF)

Hashes = NDArray[np.uint32]


def minhash_signature(shingles: list[str]) -> Hashes:
    """Return the MinHash signature [HASHES] of a set of strings.

    Raises ValueError if the package rensa is not installed.
    """
    try:
        import rensa
    except ImportError:
        raise ValueError(f"--near-duplicates needs the package rensa: {pip_install('rensa>=0.5,<0.6')}") from None
    minhash: Any = rensa.RMinHash(num_perm=HASHES, seed=1)
    minhash.update(shingles)
    return np.array(minhash.digest(), dtype=np.uint32)


def rows_per_band(similarity: float) -> int:
    """Return the largest r with which a text of exactly this similarity is a candidate with probability MIN_RECALL."""
    for rows in range(HASHES, 1, -1):
        # The probability that no band of this many numbers is equal in both texts.
        missed = (1 - similarity**rows) ** (HASHES // rows)
        if 1 - missed >= MIN_RECALL:
            return rows
    return 1


def min_estimate(similarity: float) -> float:
    """Return the smallest estimate that counts as a similarity of at least `similarity`."""
    return similarity - DEVIATIONS * math.sqrt(similarity * (1 - similarity) / HASHES)


def first_slots(keys: Hashes, num_slots: int) -> NDArray[Any]:
    """Return the slots, [n], at which the search for `keys` [n] begins in a table of 2**16 slots or more."""
    extra_bits = num_slots.bit_length() - 33
    if extra_bits > 0:  # a key has 32 bits, so these slots lie 2**extra_bits apart
        return keys.astype(np.int64) << extra_bits
    return keys & (num_slots - 1)


class BandTable:
    """Hash table from keys of bands to numbers of texts, with linear probing. A key may occur several times.

    It takes 8 bytes a slot. Python's dict would take 100 bytes for each band of each text.
    """

    def __init__(self) -> None:
        self._texts = np.full(BLOCK_ROWS, EMPTY)
        self._keys = np.zeros_like(self._texts)
        self._used = 0

    def find(self, keys: Hashes) -> tuple[Hashes, NDArray[np.int64]]:
        """Return the numbers of the texts that have one of `keys` [b], and how many texts each key has, [b]."""
        mask = len(self._keys) - 1  # the number of slots is a power of two
        slots = first_slots(keys, len(self._keys))
        active = np.arange(len(keys))  # indices of the keys whose search continues
        counts = np.zeros(len(keys), dtype=np.int64)
        found = []
        while len(active):
            # Linear probing: a key is done at an empty slot; the others look at the next slot, after the last at 0.
            active = active[self._texts[slots[active]] != EMPTY]
            probed = slots[active]
            equal = self._keys[probed] == keys[active]
            found.append(self._texts[probed[equal]])
            counts[active[equal]] += 1
            slots[active] = (probed + 1) & mask
        return np.unique(np.concatenate(found)), counts

    def add(self, keys: Hashes, text: int) -> None:
        """Add the number of a text under each of `keys` [b]."""
        if self._used + len(keys) > MAX_LOAD * len(self._keys):
            self._grow()
        self._insert(keys, np.full(len(keys), text, dtype=np.uint32))
        self._used += len(keys)

    def _grow(self) -> None:
        """Double the table, and insert its entries again, as their slots depend on its size."""
        used = self._texts != EMPTY
        keys = self._keys[used]
        texts = self._texts[used]
        self._texts = np.full(2 * len(used), EMPTY)
        self._keys = np.zeros_like(self._texts)
        self._insert(keys, texts)

    def _insert(self, keys: Hashes, texts: Hashes) -> None:
        """Put pairs of keys and texts, [n] each, into empty slots."""
        mask = len(self._keys) - 1  # the number of slots is a power of two
        slots = first_slots(keys, len(self._keys))
        waiting = np.arange(len(keys))  # indices of the pairs without a slot
        while len(waiting):
            # The first of several pairs that want the same empty slot gets it. If the pairs 4 5 6 want the slots 9 2 9,
            # `wanted` is 2 9 and `first` 1 0: pair 5 gets slot 2 and pair 4 slot 9 if they are empty. Pair 6 then
            # tries slot 10.
            wanted, first = np.unique(slots[waiting], return_index=True)
            is_free = self._texts[wanted] == EMPTY
            winners = first[is_free]  # places in `waiting` of the pairs that get a slot
            placed = waiting[winners]
            self._texts[slots[placed]] = texts[placed]
            self._keys[slots[placed]] = keys[placed]
            waiting = np.delete(waiting, winners)
            slots[waiting] = (slots[waiting] + 1) & mask


class NearDuplicates:
    """Set of texts that finds near duplicates, about 0.6 kB a text.

    A text counts as a near duplicate if its estimated similarity to an earlier text is at least `min_estimate`.
    similarity: Jaccard similarity at which at least 95 % of the near duplicates are found.
    """

    def __init__(self, similarity: float = 0.8) -> None:
        self._min_estimate = min_estimate(similarity)
        rows = rows_per_band(similarity)
        self._table = BandTable()
        self._blocks: list[NDArray[np.uint16]] = []
        self._num_texts = 0
        rng = np.random.default_rng(1)
        factors = rng.integers(0, 1 << 63, (HASHES // rows, rows), np.uint64)
        self._factors = factors | 1  # odd numbers, one for each number of each band, [b, r]

    def check_and_add(self, signature: Hashes) -> bool:
        """Return True if the set contains a text with a similar signature [HASHES]; add the signature otherwise."""
        keys = self._keys(signature)
        candidates, counts = self._table.find(keys)
        truncated = signature.astype(np.uint16)  # 16 of 32 bits: two different numbers look equal once in 65,536 times
        if len(candidates):
            known = np.stack([self._blocks[text // BLOCK_ROWS][text % BLOCK_ROWS] for text in candidates.tolist()])
            # In each row of `known` [candidates, HASHES], the share of equal numbers estimates the similarity.
            if (known == truncated).mean(1).max() >= self._min_estimate:
                return True
        block, row = divmod(self._num_texts, BLOCK_ROWS)
        if row == 0:  # blocks are allocated as they are needed
            self._blocks.append(np.empty((BLOCK_ROWS, HASHES), dtype=np.uint16))
        self._blocks[block][row] = truncated
        # A key that many texts share is left out, so that a search compares few texts.
        self._table.add(keys[counts < MAX_PER_BAND], self._num_texts)
        self._num_texts += 1
        return False

    def _keys(self, signature: Hashes) -> Hashes:
        """Return a hash of each band of a signature, [b]."""
        bands = signature[: self._factors.size].reshape(self._factors.shape)
        # Multiplicative hash with odd factors, modulo 2**64. A bit of a product depends only on bits of its factors at
        # the same place or lower. So fold the upper bits into the lower ones, multiply again, by 2**64 divided by the
        # golden ratio, and keep the upper half.
        mixed = (bands.astype(np.uint64) * self._factors).sum(1)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)).astype(np.uint32)  # type: ignore[no-any-return]

"""Near duplicates are found as often as docs/data.md says, whatever the length of the texts, in little memory."""

import random

import numpy as np
import pytest

from data_utils.dedup import shingles
from data_utils.near_duplicates import (
    EMPTY,
    HASHES,
    MAX_PER_BAND,
    BandTable,
    NearDuplicates,
    first_slots,
    min_estimate,
    minhash_signature,
    rows_per_band,
)
from tests.support import FULL

pytest.importorskip("rensa")


def pair(dice: random.Random, length: int, similarity: float) -> tuple[str, str]:
    """Return two texts of random characters with about this Jaccard similarity of their substrings of 5 characters.

    A changed character changes 5 substrings, so k changed ones leave a similarity of (n - 5 k) / (n + 5 k).
    """
    first = [chr(0x4E00 + dice.randrange(6000)) for _ in range(length)]
    changed = round(length * (1 - similarity) / (1 + similarity) / 5)
    second = list(first)
    for i in range(changed):
        second[(2 * i + 1) * length // (2 * changed)] = "改"
    return "".join(first), "".join(second)


def share_found(length: int, similarity: float, pairs: int) -> tuple[float, float]:
    """Return (mean of the exact similarities, share of pairs that are found with --similarity 0.8)."""
    dice = random.Random(length)
    exact, found = [], 0
    for _ in range(pairs):
        sets = [shingles(text) for text in pair(dice, length, similarity)]
        exact.append(len({*sets[0]} & {*sets[1]}) / len({*sets[0]} | {*sets[1]}))
        near = NearDuplicates(0.8)
        assert not near.check_and_add(minhash_signature(sets[0]))
        found += near.check_and_add(minhash_signature(sets[1]))
    return float(np.mean(exact)), found / pairs


@pytest.mark.parametrize("length", [900, pytest.param(225, marks=FULL), pytest.param(4500, marks=FULL)])
def test_the_share_of_pairs_that_are_found(length: int) -> None:
    """The bounds are those of the table in docs/data.md, less three standard deviations of 200 pairs."""
    for similarity, least, most in ((0.6, 0, 0.01), (0.8, 0.9, 1), (0.85, 0.98, 1), (0.9, 1, 1), (0.95, 1, 1)):
        mean, found = share_found(length, similarity, 200)
        assert abs(mean - similarity) < 0.025
        assert least <= found <= most, (similarity, found)


def test_an_unrelated_text_is_kept() -> None:
    dice = random.Random(1)
    near = NearDuplicates(0.8)
    for _ in range(300):
        assert not near.check_and_add(minhash_signature(shingles(pair(dice, 300, 0.5)[0])))


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_miss_few_texts_of_the_similarity(similarity: float) -> None:
    rows = rows_per_band(similarity)
    bands = HASHES // rows
    assert 1 - (1 - similarity**rows) ** bands >= 0.99
    assert rows == HASHES or 1 - (1 - similarity ** (rows + 1)) ** (HASHES // (rows + 1)) < 0.99
    assert 0 < min_estimate(similarity) <= similarity


def _bytes_of(table: BandTable) -> int:
    return table._texts.nbytes + table._keys.nbytes


def test_the_table_finds_every_text_of_a_key_after_it_has_grown() -> None:
    dice = np.random.default_rng(0)
    table = BandTable()
    kept: dict[int, set[int]] = {}
    for text in range(2500):
        keys = dice.integers(0, 5000, 20, np.uint32) * np.uint32(80_001)
        keys = keys[table.find(keys)[1] < MAX_PER_BAND]
        table.add(keys, text)
        for key in keys.tolist():
            kept.setdefault(key, set()).add(text)
    assert _bytes_of(table) == 2 * _bytes_of(BandTable()), "the table has grown once"
    for key in range(5000):
        found, counts = table.find(np.array([key * 80_001 % 2**32], dtype=np.uint32))
        assert {*found.tolist()} == kept.get(key * 80_001 % 2**32, set())
        assert counts[0] >= len(found)


def test_a_table_may_have_more_slots_than_there_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys have 32 bits. In 2**33 slots, each key has two slots of its own, so key k begins at slot 2 k."""
    keys = np.array([0, 5, 2**32 - 1], dtype=np.uint32)
    assert first_slots(keys, 2**33).tolist() == [0, 10, 2**33 - 2]
    assert first_slots(keys, 2**32).tolist() == [0, 5, 2**32 - 1]
    assert first_slots(keys, 2**16).tolist() == [0, 5, 2**16 - 1]
    table = BandTable()
    # Empty slots that take no memory.
    monkeypatch.setattr(table, "_texts", np.broadcast_to(EMPTY, 2**33))
    monkeypatch.setattr(table, "_keys", np.broadcast_to(np.uint32(0), 2**33))
    found, counts = table.find(keys)
    assert found.tolist() == [] and counts.tolist() == [0, 0, 0]


@FULL
def test_a_text_takes_less_than_a_kilobyte() -> None:
    dice = np.random.default_rng(0)
    near = NearDuplicates(0.8)
    for _ in range(40_000):
        near.check_and_add(dice.integers(0, 1 << 32, HASHES, np.uint32))
    bytes_of_blocks = sum(block.nbytes for block in near._blocks)
    assert (_bytes_of(near._table) + bytes_of_blocks) / 40_000 < 900

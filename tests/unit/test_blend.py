"""After any number of samples, a blend has the right share of each corpus; a hash identifies the samples read."""

import pickle
import re
from fractions import Fraction
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.data import corpus_prefixes
from megatron.config.data_stages import StagedCorpora, parse_stages
from megatron.data.blend import BlendedDataset, block_quotas, order_block, rare_corpora
from megatron.data.corpora import build_datasets
from megatron.data.corpus_paths import parse_blend, prefixes_of
from megatron.data.fim import FillInTheMiddle
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.data.indexed_dataset import DatasetError
from megatron.data.prefixes import Prefixes
from megatron.data.sample_hash import extend_hash
from megatron.data.t5_dataset import Objective, Specials
from megatron.data.t5_dataset import build_train_valid_test_datasets as build_t5
from tests.sentences import SENTENCES


class Numbers:
    """A dataset whose sample n is the tuple (name, n)."""

    def __init__(self, name: str, samples_per_epoch: int = 10) -> None:
        self.name, self.samples_per_epoch = name, samples_per_epoch

    def __getitem__(self, n: int) -> tuple[str, int]:
        return self.name, n

    def sample_ids(self, first: int, count: int) -> np.ndarray:
        return np.arange(first, first + count)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
@settings(deadline=None, max_examples=200)
def test_every_prefix_has_its_shares(counts: list[int]) -> None:
    order = order_block(counts)
    prefix = np.arange(1, sum(counts) + 1)
    for i, quota in enumerate(counts):
        taken = np.cumsum(order == i)
        assert taken[-1] == quota
        # Use integers, so that rounding cannot hide a deviation of exactly one sample.
        assert (np.abs(taken * sum(counts) - prefix * quota) < sum(counts)).all()


def test_the_order_of_a_block_is_the_one_of_earlier_runs() -> None:
    # The positions of 3 and 2 samples in a block of 5 are 0-1 1-3 3-4 and 0-2 2-4. The earliest end is taken first, of
    # equal ends the first corpus.
    assert order_block([3, 2]).tolist() == [0, 1, 0, 0, 1]


@given(st.lists(st.sampled_from(["0.7", "0.3", "1", "2.5", "0.125", "3", "1e-3", "17"]), min_size=1, max_size=6))
@settings(deadline=None, max_examples=100)
def test_short_weights_are_exact(weights: list[str]) -> None:
    found = block_quotas(weights)
    total = sum(map(Fraction, weights))
    assert all(Fraction(q, sum(found)) == Fraction(w) / total for q, w in zip(found, weights, strict=True))


@given(st.lists(st.integers(1, 999_999), min_size=2, max_size=8))
@settings(deadline=None, max_examples=200)
def test_rounded_shares_are_within_the_bound_of_the_page(digits: list[int]) -> None:
    weights = [f"0.{number:06d}" for number in digits]
    if rare_corpora(weights):
        return  # rare corpora form a second blend with exact shares of their own
    found = block_quotas(weights)
    total = sum(map(Fraction, weights))
    bound = Fraction(len(weights) + 1, 131_072)
    assert all(abs(Fraction(q, sum(found)) - Fraction(w) / total) <= bound for q, w in zip(found, weights, strict=True))


WEIGHTS = st.sampled_from(["0.7", "0.3", "1", "2.5", "1e-3", "0.123456789", "1e-6", "1.7182818284", "17"])


@given(st.lists(WEIGHTS, min_size=1, max_size=6), st.integers(0, 3000))
@settings(deadline=None, max_examples=40)
def test_consumed_samples_are_those_that_were_located(weights: list[str], samples: int) -> None:
    blend = BlendedDataset([Numbers(str(i)) for i in range(len(weights))], weights)
    owners = [blend.locate(n)[0] for n in range(samples)]
    consumed = blend.consumed_per_corpus(samples)
    assert consumed == [owners.count(i) for i in range(len(weights))]


@pytest.mark.parametrize(
    ("weights", "bound"),
    [((0.7, 0.3), 1), ((1, 2, 4), 1), ((1, 1e-6, 1e-5), 2), ((0.6, 0.4, 3e-6), 2), ((0.9999, 0.00004, 1e-7), 2)],
)
def test_shares_hold_after_any_number_of_samples(weights: tuple[float, ...], bound: int) -> None:
    """Of the first n samples, for any n, each corpus has its share to within one sample; two if a weight is tiny."""
    samples = 400_000
    blend = BlendedDataset([Numbers(str(i)) for i in range(len(weights))], weights)
    owners, _ = blend.locate_all(0, samples)
    prefix = np.arange(1, samples + 1)
    for i, weight in enumerate(weights):
        deviation = np.abs(np.cumsum(owners == i) - prefix * (weight / sum(weights)))
        drift = prefix * (weight / sum(weights)) / 65536  # tolerance for rounded weights
        assert (deviation < bound + drift * (bound > 1) + 1e-6).all()


@pytest.mark.parametrize(
    "weights",
    [
        (0.123456789, 1e-6, 1.7182818284, 0.0001234567, 3e-6),
        (1, 1e-9),
        (1e-9, 0.9999, 1e-4, 0.001),
        tuple(0.01 + i / 1e7 for i in range(90)),
        tuple(1 + i / 1e7 for i in range(2000)),
        (1, *[1e-5 + i * 1e-9 for i in range(300)]),
    ],
    ids=["mixed", "tiny", "short", "equal", "many", "many small"],
)
def test_any_weight_is_kept(weights: tuple[float, ...]) -> None:
    """A corpus of tiny weight, e.g. 1e-6, gets its share up to sample 1e12, and the order of its samples is right."""
    blend = BlendedDataset([Numbers(str(i)) for i in range(len(weights))], weights)
    total = sum(weights)
    for n in (0, 10**6, 10**9 + 7, 10**12 + 1):
        places = [blend.locate(k) for k in range(n, n + 3000)]
        owners, numbers = blend.locate_all(n, 3000)
        assert places == list(zip(owners.tolist(), numbers.tolist(), strict=True))
        assert blend.sample_ids(n, 3000).tolist() == [k * len(weights) + i for i, k in places]
        for which, k in places:
            share = weights[which] / total
            assert abs(k - n * share) < 3003 * share + 2 + n * (share / 100 + 1 / 65536) * (len(weights) != 2)
        for which in {i for i, _ in places}:
            mine = [k for i, k in places if i == which]
            assert mine == list(range(mine[0], mine[0] + len(mine)))
    assert blend.samples_per_epoch > 0


def test_a_millionth_is_a_millionth() -> None:
    blend = BlendedDataset([Numbers("a"), Numbers("b"), Numbers("c")], ["0.9999", "0.000099", "0.000001"])
    owners, _ = blend.locate_all(0, 4_000_000)
    assert np.bincount(owners).tolist() == [3_999_600, 396, 4]


def test_more_corpora_than_a_block_has_room_for_keep_their_shares() -> None:
    weights = [str(1000 + i % 7) for i in range(1100)] + [str(30 + i % 11) for i in range(60)]
    consumed = BlendedDataset([Numbers("")] * len(weights), weights).consumed_per_corpus(10**9)
    total = sum(map(int, weights))
    assert consumed == pytest.approx([int(weight) * 10**9 / total for weight in weights], rel=0.016)
    similar = [str(1 + i / 1e7) for i in range(2000)]  # right after rounding, so their order stays as it was
    assert rare_corpora(similar) == [] and block_quotas(similar) == [1] * 2000


def test_every_sample_of_each_corpus_comes_once_and_in_order() -> None:
    blend = BlendedDataset([Numbers("a"), Numbers("b"), Numbers("c")], ["0.5", "0.3", "0.2"])
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for n in range(1000):
        name, k = blend[n]  # type: ignore[misc]
        seen[name].append(k)
    assert {name: len(each) for name, each in seen.items()} == {"a": 500, "b": 300, "c": 200}
    assert all(each == list(range(len(each))) for each in seen.values())
    assert blend.samples_per_epoch == 20


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.integers(0, 5000))
@settings(deadline=None, max_examples=50)
def test_the_position_does_not_depend_on_batches(cuts: list[int], first: int) -> None:
    blend = BlendedDataset([Numbers("a"), Numbers("b")], ["0.7", "0.3"])
    start = extend_hash(0, blend, 0, first)
    state, at = start, first
    for count in cuts:
        state = extend_hash(state, blend, at, count)
        at += count
    assert state == extend_hash(start, blend, first, sum(cuts)) == extend_hash(0, blend, 0, at)
    swapped = BlendedDataset([Numbers("a"), Numbers("b")], ["0.3", "0.7"])
    assert state != extend_hash(0, swapped, 0, at)


def test_the_position_equals_a_loop() -> None:
    """`extend_hash` computes the same polynomial hash of the samples read as Horner's rule in a Python loop."""
    from megatron.data.sample_hash import BASE, _mix

    state = 0
    for place in range(300):
        state = (state * int(BASE) + int(_mix(np.array([place], np.uint64))[0])) % 2**64
    assert extend_hash(0, Numbers("a"), 0, 300) == state


def test_an_attribute_sample_ids_of_a_custom_data_set_is_not_called() -> None:
    assert extend_hash(0, SimpleNamespace(sample_ids=[7, 8, 9]), 0, 3) == extend_hash(0, Numbers("a"), 0, 3)


def corpus(path: Path, start: int, documents: int) -> str:
    with IndexedDatasetBuilder(path, np.uint16) as builder:
        for d in range(documents):
            builder.add_document(start + np.arange(d % 40))
    return str(path)


def test_paths(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 0, 100), corpus(tmp_path / "b b", 1000, 50)
    assert parse_blend(a) == [(None, a)]
    assert parse_blend(["0.7", a, "0.3", b]) == [("0.7", a), ("0.3", b)]
    assert parse_blend([f"0.7 {a} 0.3 {a}"]) == [("0.7", a), ("0.3", a)]
    assert prefixes_of({"train": (a, b), "valid": (a,)}) == [a, b]
    (train, valid, test), _ = build_train_valid_test_datasets(("1", a, "3", b), "8,2", 16, seed=1)
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert test is None
    from_b = sum(int(train[n]["text"][0]) >= 1000 for n in range(400))
    assert from_b == 300
    (train, valid, test), _ = build_train_valid_test_datasets({"train": (a,), "valid": (b,)}, "1", 16, seed=1)
    assert train is not None and int(train[0]["text"].max()) < 1000
    assert valid is not None and int(valid[0]["text"].min()) >= 1000


def test_all_files_of_a_corpus_are_one_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may begin with a number, and a blend may be longer than the name of a file can be."""
    monkeypatch.chdir(tmp_path)
    for name in ("x", "2024 x"):
        corpus(Path(name), 0, 1)
        Path(f"{name}.json").touch()
        Path(f"{name}.orders").mkdir()
    assert corpus_prefixes(sorted(glob("*"))) == ("2024 x", "x")
    assert parse_blend("2024 x") == [(None, "2024 x")]
    assert corpus_prefixes(["1 " + "a" * 300 + ".bin"]) == ("1 " + "a" * 300,)


def test_files_in_the_blend_of_a_named_set_are_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert corpus_prefixes(["web=a.bin", "books=0.7 b.bin 0.3 c.idx"]) == ("web=a", "books=0.7 b 0.3 c")
    monkeypatch.chdir(tmp_path)
    corpus(Path("a=b.bin"), 0, 1)  # a corpus whose name ends like a file of another one
    assert corpus_prefixes(["a=b.bin"]) == ("a=b.bin",)


def draws(kind: str, paths: Any) -> dict[str, list[list[bool]]]:
    """Return by corpus, "a" or "b", where its samples among the first 80 have special tokens or a prefix."""
    special = 60_000
    if kind == "t5":
        specials = Specials(special, special, tuple(range(special + 1, special + 30)))
        (train, _, _), _ = build_t5(paths, "1", Objective(), 32, None, specials, 1)
    else:
        fim = FillInTheMiddle(0.5, 0.5, special, special, special, special) if kind == "fim" else None
        prefixes = None if fim else Prefixes(special, by_document=False)
        (train, _, _), _ = build_train_valid_test_datasets(paths, "1", 32, 1, None, fim, prefixes)
    found: dict[str, list[list[bool]]] = {"a": [], "b": []}
    for n in range(80):
        sample = pickle.loads(pickle.dumps(train))[n] if n == 79 else train[n]  # a data worker gets such a copy
        text = sample["encoder" if kind == "t5" else "text"]
        name = "a" if int(text[text < special].max()) < 1000 else "b"
        found[name].append((sample["prefixes"] > 0 if kind == "prefixes" else text >= special).tolist())
    return found


@pytest.mark.parametrize("kind", ["fim", "prefixes", "t5"])
def test_corpora_of_a_blend_draw_independently(kind: str, tmp_path: Path) -> None:
    """Corpora with documents of equal lengths have other masks; they keep them if moved, swapped or weighted."""
    for start, folder, name in ((0, "", "a"), (1000, "", "b"), (0, "moved", "c")):
        (tmp_path / folder).mkdir(exist_ok=True)
        with IndexedDatasetBuilder(tmp_path / folder / name, np.uint16) as builder:
            for _ in range(9):
                builder.add_document(start + np.arange(300))
    a, b, c = str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "moved/c")
    alone = draws(kind, a)["a"]
    blend = draws(kind, [a, b])
    assert np.mean([x == y for x, y in zip(blend["a"], blend["b"], strict=True)]) < 0.5
    assert np.mean([x == y for x, y in zip(blend["a"], alone, strict=False)]) < 0.5
    assert draws(kind, {"train": [a], "valid": [b]})["a"] == alone, "a blend of one corpus is no blend"
    other = draws(kind, ["3", b, "1", c])
    assert other["a"] == blend["a"][:20] and other["b"][:40] == blend["b"]
    staged = draws(kind, StagedCorpora(parse_stages([f"0: {a}; 20: {b} {a}"]), None))
    assert staged == {"a": alone[:20] + blend["a"][20:] + staged["a"][40:], "b": blend["b"][:30]}


BAD_BLENDS = ["0.7 a 0.3", "-1 a 2 b", "0 a 1 b", "0.5 a inf b", "inf a 1 b", "1e999 a 1 b"]


@pytest.mark.parametrize("words", [["a", "0.5"], *map(str.split, BAD_BLENDS)])
def test_bad_blends_are_refused(words: list[str]) -> None:
    with pytest.raises(DatasetError, match="as in 0.7 a 0.3 b"):
        parse_blend(words)


@pytest.mark.parametrize("words", ["{a} {a}", "0.5 {a} 0.5 {a}", "0.5 {a} 0.3 {b} 0.2 {same}"])
@pytest.mark.parametrize("part", ["all", "train", "valid"])
def test_a_corpus_that_is_twice_in_a_blend_is_refused(words: str, part: str, tmp_path: Path) -> None:
    a = corpus(tmp_path / "a", 0, 100)
    b = corpus(tmp_path / "b", 0, 100)
    blend = words.format(a=a, b=b, same=f"{tmp_path}/./a").split()
    paths = blend if part == "all" else {"train": [b], "valid": [b], part: blend}
    with pytest.raises(DatasetError, match=re.escape(str(tmp_path))):
        build_train_valid_test_datasets(paths, "8,2", 16, seed=1)


def test_nothing_for_training() -> None:
    with pytest.raises(DatasetError, match=SENTENCES["no_training_data"]):
        build_datasets(lambda _: (10, lambda *_: None), "a", "0,1")


def test_a_number_that_is_a_weight_and_a_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2023", "2024"):
        for end in (".bin", ".idx"):
            (tmp_path / f"{name}{end}").touch()
    (tmp_path / "0.7.idx").touch()
    (tmp_path / "0.7.bin").touch()
    for name in ("2023", "0.7"):
        with pytest.raises(DatasetError, match=r"\./") as error:
            parse_blend([name, "2024"])
        advised = re.search(r" or (\S+) as weight", str(error.value))
        assert advised and float(advised[1]) == float(name)
        assert parse_blend([advised[1], "2024"]) == [(advised[1], "2024")]
    assert parse_blend(["./2023", "2024"]) == [(None, "./2023"), (None, "2024")]
    assert parse_blend(["2023.0", "2024"]) == [("2023.0", "2024")]
    assert parse_blend(["1", "2023", "2", "2024"]) == [("1", "2023"), ("2", "2024")]

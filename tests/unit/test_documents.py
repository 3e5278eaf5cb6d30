"""Where a run trains on a document, and training without documents, compared with a scan of every sample.

Each document of the corpora repeats one token id of its own. So a sample shows which documents it contains.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_utils.document_uses import uses_in, uses_of
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.iterations import Iterations
from megatron.config import Config
from megatron.config.command_line import parse
from megatron.config.fields import ConfigError
from megatron.config.without import parse_without
from megatron.data.blend import BlendedDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.sft_dataset import Records, SftDataset
from megatron.data.staged import StagedDataset
from megatron.data.t5_dataset import Objective, Specials, T5Dataset
from megatron.data.without import DatasetWithout, Rule, without

FIRST = 2  # number of the first training document of a corpus


def write(prefix: Path, corpus: int, sizes: list[int]) -> str:
    """Write a corpus whose document d consists of the token id 1000 * corpus + d."""
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for document, size in enumerate(sizes):
            builder.add_document(np.full(size, 1000 * corpus + document, np.uint16))
    with IndexedDatasetBuilder(f"{prefix}_loss", np.uint8) as builder:
        for size in sizes:
            builder.add_document(np.ones(size, np.uint8))
    return str(prefix)


def dataset(prefix: str, kind: str, seed: int) -> Any:
    indexed = IndexedDataset(prefix)
    documents = range(FIRST, indexed.num_documents)
    made: Any
    if kind == "gpt2":
        made = GPT2Dataset(indexed, documents, 8, seed, "train")
    elif kind == "sft":
        made = SftDataset(Records(prefix, None), documents, 8, 60_000, seed, "train")
    else:
        objective = Objective(mean_span_length=2.0)
        plan = objective.plan(10, None, 8)
        specials = Specials(60_000, 60_001, tuple(range(60_002, 60_010)))
        made = T5Dataset(indexed, documents, objective, plan, specials, seed, "train")
    made.prefix = prefix
    return made


def ids_of(sample: dict[str, Any], kind: str) -> set[int]:
    """Return the ids of text tokens in a sample, as numbers 1000 * corpus + document."""
    keys = {"gpt2": ["text"], "sft": ["tokens"], "t5": ["encoder", "decoder"]}[kind]
    return {i for key in keys for i in sample[key].tolist() if i < 60_000}


lengths = st.lists(st.integers(0, 30), min_size=6, max_size=20).map(lambda sizes: [*sizes, 40])


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[int, dict[int, str]]]:
    """Return 1 to 3 stages of three corpora."""
    begin, found = 0, []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
        found.append((begin, {i: draw(st.sampled_from(["1", "0.3", "2.5"])) for i in members}))
        begin += draw(st.integers(1, 40))
    return found


@pytest.mark.parametrize("kind", ["gpt2", "sft", "t5"])
@given(st.lists(lengths, min_size=3, max_size=3), plans(), st.integers(0, 99), st.data())
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_document_is_where_a_scan_finds_it(
    tmp_path: Path,
    kind: str,
    sizes: list[list[int]],
    plan: list[tuple[int, dict[int, str]]],
    seed: int,
    data: st.DataObject,
) -> None:
    samples = 90
    members = [dataset(write(tmp_path / f"c{i}", i, each), kind, seed) for i, each in enumerate(sizes)]
    whole: Any = StagedDataset(members, plan)
    shape = data.draw(st.sampled_from(["staged", "blend", "single"]))
    if shape != "staged":
        whole = BlendedDataset(members, ["1", "2", "0.5"]) if shape == "blend" else members[0]
    absent = data.draw(st.lists(st.integers(FIRST, 8), max_size=2, unique=True))
    begin = data.draw(st.integers(1, 60))
    reduced = DatasetWithout(whole, [Rule(0, {}), Rule(begin, {0: np.array(absent)} if absent else {})])
    here = members[0].samples_per_epoch
    full = absent and any(len(members[0].containing(np.array(absent), e)) == here for e in range(-(-samples // here)))
    if full:
        return  # the documents are in every sample of an epoch, which is refused
    for chosen in (whole, reduced):
        scan = [ids_of(chosen[n], kind) for n in range(samples)]
        for corpus in range(1 if shape == "single" else 3):
            for document in range(FIRST, len(sizes[corpus])):
                expected = [n for n, ids in enumerate(scan) if 1000 * corpus + document in ids]
                found = uses_of(chosen, corpus, document, samples)
                if kind == "sft":  # the last token of a record is only a target
                    found = [use for use in found if len(use.tokens)]
                assert list(dict.fromkeys(use.sample for use in found)) == expected
    left_out = set(absent)
    for n in range(samples):
        with_them = ids_of(whole[n], kind)
        if n < begin or not with_them & left_out:
            assert ids_of(reduced[n], kind) == with_them
        else:
            assert not ids_of(reduced[n], kind) & left_out
    assert (reduced.places(0, samples) == whole.places(0, samples)).all()
    again = pickle.loads(pickle.dumps(reduced))
    assert all(ids_of(again[n], kind) == ids_of(reduced[n], kind) for n in range(0, samples, 7))


def test_positions_and_tokens_are_those_of_the_sample(tmp_path: Path) -> None:
    """With text that counts up, position p of a sample holds the token that `uses_in` names."""
    dice = np.random.default_rng(0)
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in range(30):
            builder.add_document(100 * document + np.arange(dice.integers(0, 40)))
    made = GPT2Dataset(IndexedDataset(prefix), range(3, 30), 16, 5, "train")
    for n in range(3 * made.samples_per_epoch):
        text = made[n]["text"].tolist()
        uses = uses_in(made, n)
        assert sum(len(use.positions) for use in uses) == 17
        for use in uses:
            expected = [100 * use.document + token for token in use.tokens]
            assert [text[p] for p in use.positions] == expected


def settings_of(tmp_path: Path, lines: str, *flags: str) -> Config:
    (tmp_path / "out.txt").write_text(lines)
    return parse(["--without", str(tmp_path / "out.txt"), *flags], {})


def test_a_file_names_documents_and_the_settings_keep_them(tmp_path: Path) -> None:
    config = settings_of(tmp_path, "# asked for\n17\n\n20-31  # a book\n", "--data-path", "a")
    (tmp_path / "out.txt").unlink()
    assert config.data.without and parse_without(config.data.without) == [(0, {"": ["17", "20-31"]})]
    named = settings_of(tmp_path, "data/a 3\nb c 4\ndata/a 6-7\n", "--data-path", "0.5", "data/a", "0.5", "b c")
    assert parse_without(named.data.without) == [(0, {"data/a": ["3", "6-7"], "b c": ["4"]})]


@pytest.mark.parametrize(
    ("lines", "said"),
    [("", "no document"), ("17\nx\n", "line 2"), ("9-3\n", "line 1"), ("17\na 3\n", "only some"), ("-4\n", "line 1")],
)
def test_a_file_of_another_form_is_refused(lines: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--without.*{said}"):
        settings_of(tmp_path, lines, "--data-path", "a")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--without nowhere\.txt"):
        parse(["--without", "nowhere.txt", "--data-path", "a"], {})


def test_wrong_names_and_numbers_are_refused_or_noted(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / name, i, [9] * 12) for i, name in enumerate("ab")]
    members = [dataset(prefix, "gpt2", 1) for prefix in prefixes]
    blend = BlendedDataset(members, ["1", "1"])
    flags = ("--data-path", "0.5", prefixes[0], "0.5", prefixes[1])
    with pytest.raises(DatasetError, match="PREFIX NUMBER"):
        without(blend, settings_of(tmp_path, "3\n", *flags))
    with pytest.raises(DatasetError, match="no corpus c"):
        without(blend, settings_of(tmp_path, "c 3\n", *flags))
    with pytest.raises(DatasetError, match="each of the"):
        without(blend, settings_of(tmp_path, "a 0-11\n", *flags))
    _, notes = without(blend, settings_of(tmp_path, "a 3\na 1\na 99\n", *flags))
    assert len(notes) == 1 and "leave out: 1;" in notes[0] and "2 of the numbers" in notes[0]
    left, notes = without(blend, settings_of(tmp_path, "a 3\na 50-9999999999\na 60-70\na 1-4\n", *flags))
    assert "leave out: 3;" in notes[0] and f"{9999999999 - 49 + 1} of the numbers" in notes[0]
    assert left.rules[0].documents[0].tolist() == [2, 3, 4]
    left, notes = without(blend, settings_of(tmp_path, "a 99999999999999999999\n", *flags))
    assert "leave out: 0;" in notes[0] and left.rules[0].documents[0].tolist() == []
    with pytest.raises(DatasetError, match="--without"):
        without([1, 2, 3], settings_of(tmp_path, "3\n", "--data-path", prefixes[0]))


def test_iterations_and_samples(tmp_path: Path) -> None:
    """Logged rows give the sizes of past batches; the last size, or the schedule, gives those to come."""
    row = '{{"split": "train", "iteration": {}, "consumed_samples": {}, "consumed_tokens": 1}}\n'
    (tmp_path / "metrics.jsonl").write_text(row.format(4, 32) + row.format(6, 40) + '{"split": "tr')
    config = parse(["--train-iters", "9", "--skip-iterations", "5", "--data-path", "a"], {})
    found = Iterations(config, tmp_path)
    assert [found.of_sample(n) for n in (0, 7, 8, 31, 32, 35, 36, 40, 43, 44)] == [1, 1, 2, 4, 5, 5, 6, 7, 7, 8]
    assert found.samples(5) == range(32, 36) and found.samples(9) == range(48, 52)
    assert found.total == 52 and found.logged == 6
    assert found.is_skipped(5) and not found.is_skipped(6)
    scheduled = parse(
        ["--train-iters", "9", "--batch-size", "4", "--batch-size-schedule", "0:4 8_samples:12", "--data-path", "a"], {}
    )
    new = Iterations(scheduled, None)
    assert [new.of_sample(n) for n in (0, 4, 8, 19, 20)] == [1, 2, 3, 3, 4] and new.logged == 0
    assert new.total == 8 + 7 * 12

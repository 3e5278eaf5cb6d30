"""Data stages read each corpus on from its own counter; their notation, and what it refuses."""

import json
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.checkpointing import data_plan, resume
from megatron.checkpointing.data_plan import (
    describe_difference,
    join_stages,
    keeps_sample_order,
    split_selects_others,
    with_consumed_data,
)
from megatron.checkpointing.wanted import Wanted
from megatron.config import Config
from megatron.config.batches import Consumed
from megatron.config.command_line import parse
from megatron.config.data_stages import Stage, parse_stages, stages_as_json
from megatron.config.fields import ConfigError
from megatron.data.corpus_paths import corpus_names, prefixes_of
from megatron.data.sample_hash import extend_hash
from megatron.data.staged import StagedDataset
from megatron.ranks.errors import RunError
from megatron.training import inputs
from megatron.training.remote_datasets import RemoteDataset

from .test_blend import Numbers

NAMES = "abcde"
Plan = list[tuple[int, dict[int, str]]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Return 1 to 5 stages of up to 150 samples, each with some of five corpora; corpora stay, come and come back."""
    begin, found = 0, []
    for _ in range(draw(st.integers(1, 5))):
        members = draw(st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=4, unique=True))
        weights = draw(st.lists(st.sampled_from(["0.7", "0.3", "1", "2.5", "0.001", "17"]), min_size=4, max_size=4))
        found.append((begin, dict(zip(members, weights, strict=False))))
        begin += draw(st.integers(1, 150))
    return found


def dataset(plan: Plan) -> StagedDataset:
    return StagedDataset([Numbers(name) for name in NAMES], plan)


@given(plans(), st.integers(1, 700))
@settings(deadline=None, max_examples=150)
def test_each_corpus_is_read_one_by_one(plan: Plan, samples: int) -> None:
    """A slow reader that goes through the corpora sample by sample reads the same numbers."""
    staged, read = dataset(plan), Counter[int]()
    for n in range(samples):
        which, k = staged.locate(n)
        assert k == read[which], "no sample of a corpus is skipped or read twice"
        assert staged[n] == (NAMES[which], k)
        read[which] += 1
    assert staged.consumed_per_corpus(samples) == [read[i] for i in range(len(NAMES))]


@given(plans())
@settings(deadline=None, max_examples=40)
def test_in_each_stage_corpora_have_their_shares(plan: Plan) -> None:
    staged = dataset(plan)
    ends = [begin for begin, _ in plan[1:]] + [plan[-1][0] + 300]
    for (begin, weights), end in zip(plan, ends, strict=True):
        total, read = sum(map(Fraction, weights.values())), Counter[int]()
        for n in range(begin, end):
            read[staged.locate(n)[0]] += 1
            for i, weight in weights.items():
                share = Fraction(weight) / total
                assert abs(read[i] - share * (n + 1 - begin)) < 2


@given(plans(), st.data())
@settings(deadline=None, max_examples=100)
def test_what_comes_later_changes_nothing_before(plan: Plan, data: st.DataObject) -> None:
    """The samples and their hash up to the begin of a stage do not depend on this stage and later ones."""
    kept = data.draw(st.integers(1, len(plan)))
    whole, part = dataset(plan), dataset(plan[:kept])
    end = plan[kept][0] if kept < len(plan) else plan[-1][0] + 100
    assert [whole.locate(n) for n in range(end)] == [part.locate(n) for n in range(end)]
    assert extend_hash(0, whole, 0, end) == extend_hash(0, part, 0, end)
    first = data.draw(st.integers(0, end))
    places = [whole.sample_ids(n, 1)[0] for n in range(first, end)]
    np.testing.assert_array_equal(whole.sample_ids(first, end - first), np.array(places, np.int64))


def test_both_notations_are_read_alike(tmp_path: Path) -> None:
    expected = (
        Stage(0, "samples", (("0.8", "a"), ("0.2", "b"))),
        Stage(1_000_000, "samples", (("0.4", "a"), ("0.6", "c"))),
        Stage(2_000_000_000, "tokens", ((None, "b"), (None, "c"))),
    )
    short = "0: 0.8 a 0.2 b; 1M: 0.4 a 0 b 0.6 c; 2e9 tokens: b c"
    assert parse_stages([short]) == parse_stages(short.split()) == expected
    content = [
        {"samples": 0, "data": {"a": 0.8, "b": 0.2}},
        {"samples": "1_000_000", "data": {"a": 0.4, "c": 0.6}},
        {"tokens": 2_000_000_000, "data": ["b", "c"]},
    ]
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(content))
    assert parse_stages([str(path)]) == expected
    path.write_text(json.dumps(content), encoding="utf-8-sig")  # with a byte-order mark
    assert parse_stages([str(path)]) == expected
    path.write_text(json.dumps(content[0]))
    with pytest.raises(ConfigError, match=r"stages\.json must hold a JSON list"):
        parse_stages([str(path)])
    path.write_text(json.dumps(content))
    assert parse_stages([stages_as_json(expected)]) == expected
    config = parse(["--data-stages", str(path)])
    path.unlink()
    assert parse_stages(config.data.data_stages or ()) == expected, "settings contain the stages, not the file's name"


@pytest.mark.parametrize(
    "text",
    [
        "0: ./2023 ./2024",
        "0: ././2023 2024/../2024",
        '[{"samples": 0, "data": ["2023", "./2024"]}]',
        "0: 0.5 ./2023 0.5 2024",
        '[{"samples": 0, "data": {"2023": 1, "2024": 1}}]',
    ],
)
def test_corpora_of_stages_may_have_numbers_as_names(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2023.idx", "2024.idx"):
        Path(name).touch()
    paths = parse(["--data-stages", text]).data.paths
    assert [Path(prefix) for prefix in prefixes_of(paths)] == [Path("2023"), Path("2024")]
    assert corpus_names(paths) == ["2023", "2024"]


BAD = {
    "5: a": "begin at 0",
    "": "--data-stages",
    "0: a; 10: b; 10: a": "order",
    "0: a; 10: b; 5: a": "order",
    "0: 0 a 0 b": "weight above 0",
    "0: -1 a 2 b": "-1",
    "0: 0.5 a 0.5": "pairs",
    "0: 0.5 a 0.5 a": "twice",
    "0: 0.5 a 0.5 ./a": "twice",
    "0: a 0.5 b": "pairs",
    "0: nan a": "nan",
    "0: a; later: b": "later",
    "0: a; 1.5: b": "1.5",
    "0: a; 1e30: b": "1e30",
    "0: a; 10000000 T tokens: b": "10000000",
    "nowhere.json": "nowhere.json",
    '[{"samples": 0, "data": {"a": 1}, "more": 2}]': "more",
    '[{"samples": 0, "data": "a"}]': '"data"',
    '[{"samples": 0, "data": {"a": 1},}]': "line 1",
    '[{"samples": 0, "data": {"a": "x"}}]': "x",
    '[{"samples": 0, "data": {"a": 0.5, "a": 0.5}}]': "'a' more than once",
    '[{"samples": 0, "data": [["a"]]}]': '"data"',
}


@pytest.mark.parametrize("text", BAD)
def test_wrong_stages_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=BAD[text]):
        parse(["--data-stages", text])


def test_a_second_source_of_training_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="--train-data-path"):
        parse(["--data-stages", "0: a", "--train-data-path", "b"])


def test_stages_in_samples_and_tokens_must_be_in_order() -> None:
    """The length of a sample decides which of two stages, one at samples and one at tokens, begins first."""
    datasets: list[Any] = [Numbers("a"), Numbers("b")]
    with pytest.raises(ValueError, match="sample 10 follows a stage at sample 20"):
        StagedDataset(datasets, [(0, {0: "1"}), (20, {1: "1"}), (10, {0: "1"})])


def _config(*flags: str) -> Config:
    return parse(["--seq-length", "8", *flags])


def test_the_difference_is_not_the_spelling_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            builder.add_document(np.full(9, ord(name)))
    there, here = "0: 0.5 a 0.5 b; 4: b", f"0: 0.5 {tmp_path}/a 0.5 ./b; 5: b"
    found = describe_difference(_config("--data-stages", there), _config("--data-stages", here), Consumed(6, 48))
    assert found.startswith("the stage at 4 samples was b and is now"), found


def test_a_split_is_compared_with_corpora_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --train-data-path, all documents are for training, whatever --split says."""
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetBuilder("a", np.uint16) as builder:
        for _ in range(100):
            builder.add_document(np.full(9, 1))
    own = _config("--train-data-path", "a", "--valid-data-path", "a")
    own_with_split = _config("--train-data-path", "a", "--valid-data-path", "a", "--split", "8,2")
    splits = {split: _config("--data-path", "a", "--split", split) for split in ("99,1", "990,10", "1", "98,2")}
    for one, other, differ in (
        (splits["99,1"], own, True),
        (own, splits["99,1"], True),
        (splits["1"], own, False),
        (own, own_with_split, False),
        (splits["99,1"], splits["990,10"], False),
        (splits["99,1"], splits["98,2"], True),
    ):
        assert split_selects_others(one, other) == differ
        assert keeps_sample_order(one, other) != differ


def test_a_script_without_corpora_may_change_its_split() -> None:
    assert not split_selects_others(_config("--split", "8,2"), _config("--split", "9,1"))


def test_copies_of_a_corpus_keep_their_weights_in_a_new_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, token in (("a", 1), ("copy", 1), ("moved", 1), ("b", 2)):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            builder.add_document(np.full(9, token))
    first = _config("--data-path", "0.5", "a", "0.5", "b")
    second = _config("--data-path", "0.3", "a", "0.3", "copy", "0.4", "b")
    text, _ = join_stages(first, second, Consumed(10, 80), override=True)
    later = (("0.3", "a"), ("0.3", "copy"), ("0.4", "b"))
    assert parse_stages([text]) == (
        Stage(0, "samples", (("0.5", "a"), ("0.5", "b"))),
        Stage(10, "samples", later),
    )
    # The same command resumes in the new stage.
    resumed, _ = join_stages(_config("--data-stages", text), second, Consumed(20, 160), override=False)
    assert parse_stages([resumed])[1].blend == later
    # A copy in place of the corpus reads on in it.
    moved = _config("--data-path", "0.9", "moved", "0.1", "b")
    text, _ = join_stages(first, moved, Consumed(10, 80), override=True)
    assert [stage.blend[0] for stage in parse_stages([text])] == [("0.5", "moved"), ("0.9", "moved")]
    twice = _config("--data-path", "0.3", "a", "0.3", "a", "0.4", "b")
    with pytest.raises(ConfigError):
        join_stages(first, twice, Consumed(10, 80), override=True)


def test_a_length_without_effect_does_not_change_the_samples_of_a_t5() -> None:
    """With --enc-seq-length and --dec-seq-length, --seq-length sets no length of a T5's samples."""
    flags = ["--family", "t5", "--position-embedding", "relative", "--data-path", "a", "--dec-seq-length", "64"]
    lengths = (("128", "100"), ("128", "120"), ("96", "100"))
    one, same, other = (parse([*flags, "--enc-seq-length", enc, "--seq-length", seq]) for enc, seq in lengths)
    assert keeps_sample_order(one, same)
    assert not keeps_sample_order(one, other)
    without = [parse([*flags, "--seq-length", length]) for length in ("100", "120")]
    assert not keeps_sample_order(*without)


def test_begins_in_tokens_count_the_consumed_tokens_if_samples_become_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 10 samples of 24 tokens, five samples of 48 tokens are missing to 480 tokens. Later resumes keep this.

    --train-tokens is translated without a checkpoint, so a note says how to compute --train-samples.
    """
    monkeypatch.chdir(tmp_path)
    for name, token in (("a", 1), ("b", 2)):
        with IndexedDatasetBuilder(name, np.uint16) as builder:
            builder.add_document(np.full(9, token))
    sizes = ["--family", "gpt2", "--batch-size", "2", "--batch-size-schedule", "0:2 480:4"]
    flags = [*sizes, "--data-stages", "0: a; 480 tokens: b"]
    saved = parse([*flags, "--seq-length", "24"])
    longer = parse([*flags, "--seq-length", "48", "--train-tokens", "4800"])
    for samples, tokens in ((10, 240), (12, 336), (20, 720)):
        reader = SimpleNamespace(state={"consumed_samples": samples, "consumed_tokens": tokens})
        saved = _resumed(longer, saved, reader, monkeypatch)
        assert [stage.in_samples(48).begin for stage in parse_stages(saved.data.data_stages or ())] == [0, 15]
        assert f"--train-samples {samples} + (T - {tokens}) / 48" in capsys.readouterr().out
        batches = saved.batch_schedule(1)
        assert all(batches.size_at(n) == (2 if n < 15 else 4) for n in range(samples, 30))


def _resumed(config: Config, saved: Config, reader: Any, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the settings of a run that resumes with `config` from a checkpoint whose settings are `saved`."""
    monkeypatch.setattr(data_plan, "CheckpointReader", lambda path: reader)
    monkeypatch.setattr(data_plan, "plain_config", lambda reader: saved)
    return with_consumed_data(config, Path("checkpoint"), Wanted(same_data=False), reads_corpora=True)


@pytest.mark.parametrize(("begin", "is_late"), [(20, False), (34, False), (47, False), (48, True)])
@pytest.mark.parametrize("size", ["--gas 2", "--batch-size-schedule 0:4"])
def test_a_stage_is_late_if_the_remaining_batches_do_not_reach_it(
    begin: int, is_late: bool, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 4 iterations of 8 samples, 4 iterations of 4 samples end at sample 48."""
    config = parse(["--batch-size", "2", "--train-iters", "8", *size.split()])
    reader = SimpleNamespace(state={"iteration": 4, "consumed_samples": 32})
    monkeypatch.setattr(resume, "CheckpointReader", lambda path: reader)
    monkeypatch.setattr(inputs.dist, "get_world_size", lambda: 1)
    start = resume.Start(Path("checkpoint"), Wanted())
    dataset = RemoteDataset(None, [0, begin])
    with pytest.raises(RunError, match="--data-stages") if is_late else nullcontext():
        inputs.check_stages(dataset, config, start)

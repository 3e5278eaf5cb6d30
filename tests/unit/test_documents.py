"""Uses of documents in a run, compared with a scan of every sample, and corpora from which documents are dropped.

Each document of the corpora repeats one token id of its own. So a sample shows which documents it contains.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_utils import inspect_data
from data_utils.document_uses import uses_in_sample, uses_of_document
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.iterations import Iterations
from megatron.config.command_line import parse
from megatron.data.blend import BlendedDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.sft_dataset import Records, SftDataset
from megatron.data.staged import StagedDataset
from megatron.data.t5_dataset import Objective, Specials, T5Dataset

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
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
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
    scan = [ids_of(whole[n], kind) for n in range(samples)]
    for corpus in range(1 if shape == "single" else 3):
        for document in range(FIRST, len(sizes[corpus])):
            expected = [n for n, ids in enumerate(scan) if 1000 * corpus + document in ids]
            found = uses_of_document(whole, corpus, document, samples)
            if kind == "sft":  # the last token of a record is only a target
                found = [use for use in found if len(use.tokens)]
            assert list(dict.fromkeys(use.sample for use in found)) == expected


def test_positions_and_tokens_are_those_of_the_sample(tmp_path: Path) -> None:
    """With text that counts up, position p of a sample holds the token that `uses_in_sample` names."""
    dice = np.random.default_rng(0)
    prefix = str(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for document in range(30):
            builder.add_document(100 * document + np.arange(dice.integers(0, 40)))
    made = GPT2Dataset(IndexedDataset(prefix), range(3, 30), 16, 5, "train")
    for n in range(3 * made.samples_per_epoch):
        text = made[n]["text"].tolist()
        uses = uses_in_sample(made, n)
        assert sum(len(use.positions) for use in uses) == 17
        for use in uses:
            expected = [100 * use.document + token for token in use.tokens]
            assert [text[p] for p in use.positions] == expected


def run(*words: str) -> None:
    args = inspect_data.build_parser().parse_args(words)
    args.function(args)


def drop(*words: str) -> None:
    run("drop", *words)


def test_a_corpus_without_documents_has_all_others_and_their_loss_mask(tmp_path: Path) -> None:
    sizes = [3, 0, 5, 7, 0, 2, 4]
    prefix = write(tmp_path / "a", 1, sizes)
    sidecar = {"fingerprint": "0123", "vocab_size": 2000, "documents": 7, "tokens": 21}
    (tmp_path / "a.json").write_text(json.dumps(sidecar))
    output = str(tmp_path / "b")
    (tmp_path / "dropped").write_text("0\n4\n")
    drop(prefix, "4-5", f"@{tmp_path}/dropped", "--output", output)
    left = [1, 2, 3, 6]
    found, mask = IndexedDataset(output), IndexedDataset(f"{output}_loss")
    assert [found[i].tolist() for i in range(len(found))] == [[1000 + d] * sizes[d] for d in left]
    assert [mask[i].tolist() for i in range(len(mask))] == [[1] * sizes[d] for d in left]
    about = json.loads((tmp_path / "b.json").read_text())
    assert (about["fingerprint"], about["documents"], about["tokens"]) == ("0123", 4, 16)
    verified = inspect_data.build_parser().parse_args(["verify", output])
    verified.function(verified)


@pytest.mark.parametrize(
    "words", [["7"], ["5-9"], ["0-6"], ["0-3", "2-6"], ["x"], ["2", "1-"], ["3-1"], ["1,2"], ["9" * 30]]
)
def test_documents_that_a_corpus_lacks_and_all_documents_are_refused(tmp_path: Path, words: list[str]) -> None:
    prefix = write(tmp_path / "a", 1, [3] * 7)
    with pytest.raises(DatasetError):
        drop(prefix, *words, "--output", str(tmp_path / "b"))
    assert not list(tmp_path.glob("b*"))


def test_a_corpus_is_not_overwritten_by_its_rest(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 1, [3] * 7)
    with pytest.raises(ValueError, match="--output"):
        drop(prefix, "1", "--output", prefix)


def test_no_part_of_a_corpus_overwrites_the_corpus(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a_train", 1, [3] * 8)
    with pytest.raises(ValueError):
        run("split", prefix, "--split", "50,50", "--output", str(tmp_path / "a"))
    assert IndexedDataset(prefix).num_documents == 8
    with pytest.raises(ValueError):
        run("merge", write(tmp_path / "b", 2, [3]), prefix, "--output", f"{prefix}_loss")
    assert IndexedDataset(f"{prefix}_loss").num_documents == 8
    run("split", prefix, "--split", "50,25,25", "--output", str(tmp_path / "c"))
    with pytest.raises(ValueError, match=r"--split 50,50 gives no documents to \S+/c_test, which exists"):
        run("split", prefix, "--split", "50,50", "--output", str(tmp_path / "c"))


@pytest.mark.parametrize("words", [["merge"], ["split", "--split", "50,50"], ["drop", "1"]])
def test_a_multimodal_corpus_is_not_written_without_its_modes(tmp_path: Path, words: list[str]) -> None:
    prefix = write(tmp_path / "a", 1, [3] * 7)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes([0, 1, 0, 0, 1, 1, 0]))  # Megatron Core writes the modes of the sequences last
    assert IndexedDataset(prefix)[6].tolist() == [1006] * 3
    with pytest.raises(DatasetError, match="modes"):
        run(words[0], prefix, *words[1:], "--output", str(tmp_path / "b"))
    assert not list(tmp_path.glob("b*"))


def test_a_merged_corpus_replaces_neither_text_nor_keeps_an_old_sidecar(tmp_path: Path) -> None:
    pairs = [write(tmp_path / "a", 1, [3] * 4), write(tmp_path / "b", 2, [5] * 2)]
    output = str(tmp_path / "ab")
    sidecar = tmp_path / "ab.json"
    sidecar.write_text('[{"text": "raw"}]')
    with pytest.raises(ValueError):
        run("merge", *pairs, "--output", output)
    assert sidecar.read_text() == '[{"text": "raw"}]'
    sidecar.write_text(json.dumps({"fingerprint": "0123", "tokens": 7, "sha256": {"ab": {"bin": ["0"], "idx": ["0"]}}}))
    run("merge", *pairs, "--output", output)
    run("verify", output)
    assert IndexedDataset(output).num_tokens == 22 and not sidecar.exists()


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("words", [["merge"], ["drop", "1"]])
def test_no_corpus_is_written_beside_the_loss_mask_of_an_older_one(
    tmp_path: Path, words: list[str], has_tokens: bool
) -> None:
    """The mask would count as that of the new corpus, also if the old tokens were deleted."""
    old = write(tmp_path / "old", 1, [3] * 4)
    new = write(tmp_path / "new", 2, [3] * 4)
    for ending in ("bin", "idx"):
        Path(f"{new}_loss.{ending}").unlink()
    with pytest.raises(ValueError, match=f"{old}_loss"):
        run(words[0], new, *words[1:], "--output", old)
    assert IndexedDataset(old)[0][0] == 1000
    if not has_tokens:
        for ending in ("bin", "idx"):
            Path(f"{old}.{ending}").unlink()
        with pytest.raises(ValueError, match=f"{old}_loss"):
            run(words[0], new, *words[1:], "--output", old)
        return
    run(words[0], old, *words[1:], "--output", new)  # a corpus with a mask replaces one without it
    run(words[0], old, *words[1:], "--output", new)
    assert IndexedDataset(f"{new}_loss").num_documents == IndexedDataset(new).num_documents


@pytest.mark.parametrize(("second", "fits"), [({}, True), ({"append_eod": False}, False), ({"eod": 6}, False)])
def test_documents_of_a_merged_corpus_end_alike(tmp_path: Path, second: dict[str, Any], fits: bool) -> None:
    pairs = [write(tmp_path / "a", 1, [3] * 4), write(tmp_path / "b", 2, [5] * 2)]
    for name, entries in {"a": {}, "b": second}.items():
        sidecar = {"fingerprint": "0123", "eod": 5, "append_eod": True, **entries}
        (tmp_path / f"{name}.json").write_text(json.dumps(sidecar))
    if fits:
        run("merge", *pairs, "--output", str(tmp_path / "ab"))
        assert json.loads((tmp_path / "ab.json").read_text())["append_eod"]
        return
    with pytest.raises(ValueError):
        run("merge", *pairs, "--output", str(tmp_path / "ab"))
    assert not list(tmp_path.glob("ab*"))


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
    (tmp_path / "metrics.jsonl").write_text(row.format(3, 11))  # a resume changed the batch size between log lines
    changed = Iterations(config, tmp_path)
    sizes = [[changed.of_sample(n) for n in changed.samples(i)] for i in (1, 2, 3, 4)]
    assert sizes == [[1] * 4, [2] * 4, [3] * 3, [4] * 3] and changed.samples(4).start == 11


@pytest.mark.parametrize(("first", "later"), [("0:4 40_samples:8", "0:8"), ("0:4", "0:16")])
def test_past_iterations_have_the_sizes_that_were_logged(first: str, later: str, tmp_path: Path) -> None:
    """A resumed run may have a schedule without the sizes of the past, or with other ones."""
    base = ["--train-iters", "30", "--batch-size", "4", "--data-path", "a"]
    truth = parse([*base, "--batch-size-schedule", first], {}).batch_schedule(1)
    rows = [
        {"split": "train", "iteration": n, "consumed_samples": truth.advance(0, n), "consumed_tokens": 1}
        for n in (10, 20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = Iterations(parse([*base, "--batch-size-schedule", later], {}), tmp_path)
    for number in range(1, 21):
        begin = truth.advance(0, number - 1)
        assert found.samples(number) == range(begin, truth.advance(begin, 1))
        assert found.of_sample(begin) == number
    last_size = int(later.split(":")[1])
    assert len(found.samples(21)) == last_size

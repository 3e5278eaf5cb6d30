"""Corpora of the right size whose content is wrong: other middles, wrong checksums, holes; renamed pairs."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils import inspect_data
from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.checkpointing import consumed, data_plan
from megatron.config.command_line import parse
from megatron.data import corpus_paths, damage
from megatron.data.corpus_paths import TRIPLE_PARTS
from megatron.data.damage import find_damage, find_holes, find_problems, sidecar_sums
from megatron.data.fingerprints import content_fingerprint, corpus_fingerprint, made_with
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_hash import extend_hash
from megatron.data.staged import StagedDataset
from megatron.training import inputs

EOD = 7


def corpus(prefix: Path, tokens: int = 300_000, seed: int = 0, longest: int = 2000) -> str:
    """Write a pair whose documents end with EOD, and its sidecar."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        left = tokens
        while left > 0:
            size = min(int(rng.integers(1, longest)), left)
            builder.add_document([*rng.integers(8, 1000, size - 1).tolist(), EOD])
            left -= size
    about = {"tokenizer": "none", "eod": EOD, "tokens": builder.num_tokens, "vocab_size": 1000}
    about |= {"fingerprint": "0", "sha256": {prefix.name: builder.checksums}}
    Path(f"{prefix}.json").write_text(json.dumps(about))
    return str(prefix)


def overwrite(prefix: str, begin: int, values: Any) -> None:
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    tokens[begin : begin + len(values)] = values
    tokens.flush()


def about(prefix: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(f"{prefix}.json").read_text())
    return content


def test_another_middle_is_another_corpus(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    looks = content_fingerprint(prefix), corpus_fingerprint(prefix)
    middle = np.fromfile(f"{prefix}.bin", np.uint16)[40_000:260_000]
    overwrite(prefix, 40_000, middle[::-1])
    assert corpus_fingerprint(prefix) == looks[1] and content_fingerprint(prefix) != looks[0]
    overwrite(prefix, 40_000, middle)
    assert (content_fingerprint(prefix), corpus_fingerprint(prefix)) == looks


def test_the_sha_256_is_that_of_the_sidecar(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    sums = sidecar_sums(prefix, about(prefix))
    assert sums and sums["bin"] == [hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()]
    assert [*find_damage(prefix, sums)] == [] == [*find_problems(prefix, 1)]
    overwrite(prefix, 1000, [9])
    assert len([*find_damage(prefix, sums)]) == 1
    (problem,) = find_problems(prefix, 1)
    assert f"{prefix}.bin" in problem


def test_the_sidecar_of_a_renamed_corpus_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State is not keyed by the name that the files had when they were written."""
    before = corpus(tmp_path / "before")
    for end in (".bin", ".idx", ".json"):
        Path(before + end).rename(tmp_path / f"after{end}")
    after = str(tmp_path / "after")
    parser = inspect_data.build_parser()
    args = parser.parse_args(["verify", after])
    args.function(args)
    assert "checksums" in capsys.readouterr().out
    overwrite(after, 1000, [9])
    with pytest.raises(ValueError, match=r"after\.bin is damaged"):
        args.function(args)


@pytest.mark.parametrize(
    ("names", "pair", "wanted"),
    [
        (["x"], "y", "x"),
        (["x", "x_loss"], "y", "x"),
        (["x", "x_loss"], "y_loss", "x_loss"),
        (["x", "x_loss"], "x_loss", "x_loss"),
        (["x_context", "x_source", "x_target"], "y_source", "x_source"),
        (["x_context", "x_source", "x_target"], "y", None),
    ],
)
def test_the_entry_of_each_pair(names: list[str], pair: str, wanted: str | None) -> None:
    sidecar = {"sha256": {name: {"bin": [name]} for name in names}}
    assert sidecar_sums(f"data/{pair}", sidecar) == (sidecar["sha256"][wanted] if wanted else None)


def test_a_masked_corpus_whose_pairs_were_merged_keeps_tokenizer_and_checksums(tmp_path: Path) -> None:
    for name in "ab":
        sums = {}
        for part in TRIPLE_PARTS:
            with IndexedDatasetBuilder(tmp_path / f"{name}_{part}", np.int32) as builder:
                builder.add_document([1, 2, 3, len(part)])
            sums[f"{name}_{part}"] = builder.checksums
        (tmp_path / f"{name}.json").write_text(json.dumps({"fingerprint": "0123", "tokens": 12, "sha256": sums}))
    prefix = str(tmp_path / "ab")
    for part in TRIPLE_PARTS:
        words = ["merge", f"{tmp_path}/a_{part}", f"{tmp_path}/b_{part}", "--output", f"{prefix}_{part}"]
        args = inspect_data.build_parser().parse_args(words)
        args.function(args)
    metadata = made_with(prefix)
    assert metadata is not None and metadata["fingerprint"] == "0123"
    assert list(find_problems(prefix)) == []
    with open(f"{prefix}_target.bin", "r+b") as file:
        file.write(b"\7")
    (problem,) = find_problems(prefix)
    assert f"{prefix}_target.bin" in problem


@pytest.mark.parametrize("token", [0, 500])
@pytest.mark.parametrize("most", [None, 64])
def test_a_hole_is_named_by_file_and_place(token: int, most: int | None, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    assert [*find_holes(IndexedDataset(prefix), EOD, most)] == []
    overwrite(prefix, 40_000, [token] * 220_000)
    (problem,) = find_holes(IndexedDataset(prefix), EOD, most)
    assert f"{prefix}.bin" in problem and "80000 to 520000" in problem and f"id {token} " in problem


def test_a_hole_across_two_blocks_is_found(tmp_path: Path) -> None:
    """Each block has less of the hole than the shortest run that counts."""
    prefix = str(tmp_path / "x")
    dice = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(11_000):
            builder.add_document([*dice.integers(1, 400, 99).tolist(), EOD])
    begin = damage.TOKENS_AT_ONCE - 750
    overwrite(prefix, begin, [0] * 1500)
    (problem,) = find_holes(IndexedDataset(prefix), EOD)
    assert f"{2 * begin} to {2 * (begin + 1500)}" in problem


def test_long_runs_that_are_no_holes(tmp_path: Path) -> None:
    """A long document of one id, and empty documents, which hold only their end."""
    with IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_document([3] * 50_000 + [EOD])
        for _ in range(60_000):
            builder.add_document([EOD])
    for eod in (EOD, None):
        assert [*find_holes(IndexedDataset(str(tmp_path / "x")), eod)] == []


@pytest.mark.parametrize("sidecar", [True, False])
def test_a_run_refuses_a_corpus_with_a_hole(sidecar: bool, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    config = parse(["--data-path", prefix])
    inputs.check_corpora(config)
    overwrite(prefix, 40_000, [0] * 220_000)
    if not sidecar:
        Path(f"{prefix}.json").unlink()
    with pytest.raises(ValueError, match=rf"{prefix}\.bin"):
        inputs.check_corpora(config)


class Samples:
    """A data set whose samples are their numbers."""

    samples_per_epoch = 1000

    def sample_ids(self, first: int, count: int) -> Any:
        return np.arange(first, first + count)


def test_checkpoints_of_earlier_versions_still_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash that was computed before: SHA-256 of the fingerprints of the ends, and these as salts of stages."""
    prefixes = [corpus(tmp_path / name, 5000, seed) for seed, name in enumerate("ab")]
    monkeypatch.setattr(data_plan, "describe_difference", lambda *_: "")
    stages = [(0, {0: "1"}), (50, {0: "1", 1: "1"})]
    ends = [int(corpus_fingerprint(prefix), 16) for prefix in prefixes]
    salts = [int(content_fingerprint(prefix), 16) for prefix in prefixes]
    dataset = StagedDataset([Samples(), Samples()], stages, salts, prefixes)
    config = parse(["--data-stages", f"0: {prefixes[0]}; 50_samples: 1 {prefixes[0]} 1 {prefixes[1]}"])
    begin = int.from_bytes(hashlib.sha256(corpus_fingerprint(prefixes[0]).encode()).digest()[:8])
    then = extend_hash(begin, StagedDataset([Samples(), Samples()], stages, ends), 0, 80)
    wanted: Any = SimpleNamespace(same_data=True)

    def resumed(stored: int) -> int:
        state: Any = SimpleNamespace(sample_hash=stored, consumed_samples=80, consumed_tokens=0)
        return consumed.hash_samples(consumed.initial_hash(config), state, config, config, dataset, wanted)

    now = extend_hash(consumed.initial_hash(config), dataset, 0, 80)
    assert resumed(then) == resumed(now) == now != then
    with pytest.raises(ValueError, match="--override-data"):
        resumed(then + 1)


def triple(prefix: Path, seed: int) -> str:
    """Write the three pairs of a corpus that was masked during preprocessing, with any tokens."""
    for number, part in enumerate(TRIPLE_PARTS):
        corpus(Path(f"{prefix}_{part}"), 5000, 10 * seed + number)
    return str(prefix)


@pytest.mark.parametrize("part", TRIPLE_PARTS)
def test_each_pair_of_a_masked_corpus_is_part_of_its_fingerprint(part: str, tmp_path: Path) -> None:
    prefix = triple(tmp_path / "x", seed=1)
    before = content_fingerprint(prefix)
    overwrite(f"{prefix}_{part}", 10, [1])
    assert content_fingerprint(prefix) != before
    corpus(tmp_path / "x", 5000)  # a plain corpus beside them has the fingerprint that it has alone
    assert content_fingerprint(prefix) == content_fingerprint(corpus(tmp_path / "y", 5000))


@pytest.mark.parametrize("version", ["blocks", "ends"])
def test_a_masked_corpus_resumes_the_runs_of_versions_that_did_not_read_its_files(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fingerprint was the SHA-256 of nothing, or since `content_fingerprint` the SHA-256 of that."""
    monkeypatch.setattr(data_plan, "describe_difference", lambda *_: "")
    former = hashlib.sha256().hexdigest()[:12]
    if version == "blocks":
        former = hashlib.sha256(former.encode()).hexdigest()[:12]
    prefixes = [triple(tmp_path / "a", seed=1), triple(tmp_path / "b", seed=2)]
    stages = [(0, {0: "1"}), (50, {0: "1", 1: "1"})]
    salts = [int(content_fingerprint(prefix), 16) for prefix in prefixes]
    dataset = StagedDataset([Samples(), Samples()], stages, salts, prefixes)
    config = parse(["--data-stages", f"0: {prefixes[0]}; 50: 1 {prefixes[0]} 1 {prefixes[1]}"])
    begin = int.from_bytes(hashlib.sha256(former.encode()).digest()[:8])
    then = extend_hash(begin, StagedDataset([Samples(), Samples()], stages, [int(former, 16)] * 2), 0, 80)
    state: Any = SimpleNamespace(sample_hash=then, consumed_samples=80, consumed_tokens=0)
    wanted: Any = SimpleNamespace(same_data=True)
    now = extend_hash(consumed.initial_hash(config), dataset, 0, 80)
    assert consumed.hash_samples(consumed.initial_hash(config), state, config, config, dataset, wanted) == now != then
    state.sample_hash = now
    overwrite(f"{prefixes[0]}_target", 10, [1])
    with pytest.raises(ValueError, match="--override-data"):  # the run began with the present version
        consumed.hash_samples(consumed.initial_hash(config), state, config, config, dataset, wanted)


def verify(prefix: str) -> None:
    args = inspect_data.build_parser().parse_args(["verify", prefix])
    args.function(args)


@pytest.mark.parametrize("name", ["long_context", "hair_loss"])
@pytest.mark.parametrize("has_sibling", [False, True])
def test_the_ending_of_a_name_alone_makes_no_mask(name: str, has_sibling: bool, tmp_path: Path) -> None:
    """Corpora with such names are checked like others, also beside a corpus of the name without the ending."""
    prefix = corpus(tmp_path / name, 5000)
    if has_sibling:
        sibling = corpus(tmp_path / name.rpartition("_")[0], 5000, seed=1)
        assert [*find_problems(sibling)] == []
        assert not corpus_paths.is_triple(sibling)
        verify(sibling)
    verify(prefix)
    overwrite(prefix, 1234, [65000])
    content = about(prefix)
    del content["sha256"]
    Path(f"{prefix}.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="65000"):
        verify(prefix)


def test_a_loss_mask_holds_only_zeros_and_ones(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "chats", 500)
    Path(f"{prefix}.json").unlink()
    sizes = IndexedDataset(prefix).sizes.tolist()
    with IndexedDatasetBuilder(f"{prefix}_loss", np.uint8) as builder:
        for size in sizes:
            builder.add_document([2] * size)
    with pytest.raises(ValueError, match="_loss.bin.* 2 "):
        verify(prefix)

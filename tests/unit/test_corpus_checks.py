"""Comparison of all blocks of corpora with their checksums beside a run."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_utils.indexed_writer import IndexedDatasetBuilder
from megatron.config.command_line import parse
from megatron.data import remote_tokens
from megatron.data.damage import Block
from megatron.data.indexed_dataset import DatasetError
from megatron.data.remote_tokens import RemoteTokens
from megatron.features import corpus_checks
from megatron.features.corpus_checks import CorpusChecks, CorpusFile
from megatron.ranks.errors import RunError
from megatron.storage import RemotePath, to_path
from megatron.tokenizer import load_tokenizer
from megatron.training import train
from tests.checkpoints.runs import Start, make
from tests.support import on_ranks

BLOCK = 4096  # bytes of a block with a checksum


def corpus(prefix: Path, tokens: int = 50_000) -> str:
    """Write a pair and a sidecar with a SHA-256 for each `BLOCK` bytes, by hand."""
    draw = np.random.default_rng(0)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(tokens // 500):
            builder.add_document(draw.integers(8, 60, 500).tolist())
    sums: dict[str, Any] = {"block": BLOCK}
    for ending in ("bin", "idx"):
        content = Path(f"{prefix}.{ending}").read_bytes()
        pieces = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)]
        sums[ending] = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    Path(f"{prefix}.json").write_text(json.dumps({"fingerprint": "", "sha256": {prefix.name: sums}}))
    return str(prefix)


def change_token(prefix: str, at: int) -> None:
    tokens = np.memmap(f"{prefix}.bin", np.uint16, "r+")
    tokens[at] = 7
    tokens.flush()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, and the whole check before the first step."""
    monkeypatch.setattr(corpus_checks, "REST_FACTOR", 0)
    monkeypatch.setattr(corpus_checks, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(corpus_checks, "reads_data", lambda: True)


def started(prefix: str) -> CorpusChecks:
    feature = CorpusChecks()
    folder = Path(prefix).parent
    run: Any = SimpleNamespace(
        config=parse(["--data-path", prefix]), run_dir=folder, state=SimpleNamespace(iteration=10)
    )
    feature.prepare(run)
    feature.start(run)
    return feature


def test_a_change_between_the_opening_and_the_first_step_is_noticed(quick: None, tmp_path: Path) -> None:
    """A large model takes minutes to build after the data sets were opened."""
    prefix = corpus(tmp_path / "x")
    feature = CorpusChecks()
    run: Any = SimpleNamespace(
        config=parse(["--data-path", prefix]), run_dir=tmp_path, state=SimpleNamespace(iteration=0)
    )
    feature.prepare(run)
    change_token(prefix, 5)
    feature.start(run)
    with pytest.raises((RunError, DatasetError), match=rf"{prefix}\.bin"):
        feature.before_save(20)


def test_each_block_is_compared(quick: None, tmp_path: Path) -> None:
    """A change in any block ends the run, also if the first look at the start misses it."""
    prefix = corpus(tmp_path / "x")
    for at in (0, 3 * BLOCK // 2, 11 * BLOCK // 2 + 9, 49_999):
        honest = Path(f"{prefix}.bin").read_bytes()
        change_token(prefix, at)
        feature = started(prefix)
        feature._checkers[0].join(20)
        block = 2 * at // BLOCK * BLOCK
        with pytest.raises(DatasetError, match=rf"{prefix}\.bin is damaged in bytes {block} to "):
            feature.before_step(1)
        Path(f"{prefix}.bin").write_bytes(honest)
    feature = started(prefix)
    feature._checkers[0].join(20)
    feature.before_step(1)
    feature.close(None)


@pytest.mark.parametrize("ending", ["bin", "idx"])
@pytest.mark.parametrize("how", ["in place", "replaced", "longer"])
def test_a_file_that_changes_ends_the_run_at_the_next_save(how: str, ending: str, quick: None, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    for number in (10, 20, 30):
        (tmp_path / f"checkpoints/iter_{number:07}").mkdir(parents=True)
    feature = started(prefix)
    feature._checkers[0].join(20)
    feature.before_save(20)
    path = Path(f"{prefix}.{ending}")
    content = path.read_bytes()
    target = path.with_suffix(".new") if how == "replaced" else path
    target.write_bytes(content + bytes(8) if how == "longer" else bytes(len(content)))
    target.rename(path)
    with pytest.raises(RunError, match=rf"{path}.* write iter_0000020, "):
        feature.before_save(30)


def test_a_file_without_checksums_that_changes_ends_the_run(quick: None, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    Path(f"{prefix}.json").unlink()
    feature = started(prefix)
    feature.before_save(10)
    change_token(prefix, 7)
    os.utime(f"{prefix}.bin")  # writes to mapped memory need not change the time at once
    with pytest.raises(RunError, match=rf"{prefix}\.bin has no checksums.* start again"):
        feature.before_save(20)


def test_a_file_with_another_time_or_inode_but_the_same_content_is_noted(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = corpus(tmp_path / "x")
    feature = started(prefix)
    os.utime(f"{prefix}.bin")
    shutil.copy(f"{prefix}.idx", f"{prefix}.new")
    os.replace(f"{prefix}.new", f"{prefix}.idx")
    feature.before_save(20)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and f"{prefix}.bin" in notes[0] and f"{prefix}.idx" in notes[0]
    feature.before_save(30)
    Path(f"{prefix}.bin").unlink()
    feature.before_save(40)
    assert "note" not in capsys.readouterr().out


def test_a_changed_block_that_the_save_missed_ends_the_run_later(quick: None, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    (tmp_path / "checkpoints/iter_0000010").mkdir(parents=True)
    feature = started(prefix)
    feature._checkers[0].join(20)
    change_token(prefix, 3 * BLOCK // 2)  # in block 2 of 25, of which the save compares four
    os.utime(f"{prefix}.bin")
    feature.before_save(20)
    feature._checkers[1].join(20)
    with pytest.raises(DatasetError, match=rf"{prefix}\.bin .* write iter_0000010, "):
        feature.before_step(21)
    with pytest.raises(RunError):
        feature.before_save(22)


def test_files_that_were_compared_at_the_start(quick: None, tmp_path: Path) -> None:
    assert started(corpus(tmp_path / "x", 3000))._checkers == []


def test_a_file_that_is_gone_is_noted(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run can train on a mapped file that was deleted, so it goes on."""
    prefix = corpus(tmp_path / "x")
    feature = CorpusChecks()
    files = corpus_checks._files_of(parse(["--data-path", prefix]))
    Path(f"{prefix}.bin").unlink()
    feature._checkers = [corpus_checks.Checker(files)]
    feature._checkers[0].run()
    feature.before_step(1)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and f"{prefix}.bin" in notes[0]


@pytest.mark.parametrize("damaged", [False, True])
def test_blocks_of_an_object_are_compared_when_they_are_in_the_cache(
    damaged: bool, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(remote_tokens.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_tokens, "BLOCK", BLOCK // 2)
    monkeypatch.setattr(remote_tokens, "BLOCKS_PER_FILE", 4)
    prefix = corpus(tmp_path / "x")
    url = f"memory://bucket/{tmp_path.name}-{damaged}"
    if damaged:
        change_token(prefix, 5 * BLOCK // 2 + 1)  # in the sixth of 25 blocks
    for ending in (".bin", ".idx", ".json"):
        RemotePath(url + ending).upload(Path(prefix + ending))
    tokens = RemoteTokens(to_path(f"{url}.bin"), np.dtype(np.uint16))  # type: ignore[arg-type]
    file = corpus_checks._corpus_file(tokens.path, {"block": BLOCK} | _sums(prefix))
    checker = corpus_checks.Checker([file])
    checker.start()
    _ = tokens[:8000]
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        assert checker.problem is None and checker.is_alive()
        time.sleep(0.1)
    for begin in range(0, len(tokens), 1000):
        _ = tokens[begin : begin + 1000]
    checker.join(20)
    assert not checker.is_alive()
    assert damaged == bool(checker.problem)
    if checker.problem:
        assert f"{url}.bin" in checker.problem and f"{5 * BLOCK} to {6 * BLOCK}" in checker.problem


@pytest.mark.parametrize("is_begun_again", [True, False])
def test_a_file_that_leaves_the_cache_while_it_is_read_is_not_damaged(
    is_begun_again: bool, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are compared later, when they are in the cache again."""
    monkeypatch.setenv(remote_tokens.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_tokens, "BLOCK", BLOCK // 2)
    monkeypatch.setattr(remote_tokens, "BLOCKS_PER_FILE", 4)
    prefix = corpus(tmp_path / "x", tokens=4000)
    url = f"memory://bucket/{tmp_path.name}"
    for ending in (".bin", ".idx", ".json"):
        RemotePath(url + ending).upload(Path(prefix + ending))
    tokens = RemoteTokens(to_path(f"{url}.bin"), np.dtype(np.uint16))  # type: ignore[arg-type]
    file = corpus_checks._corpus_file(tokens.path, {"block": BLOCK} | _sums(prefix))
    _ = tokens[:]
    read_pieces = corpus_checks._read_pieces

    def evict_and_read(pieces: Any) -> Any:
        remote_tokens.evict(tmp_path / "cache", 0)
        if is_begun_again:  # by another process, with another block
            _ = RemoteTokens(to_path(f"{url}.bin"), np.dtype(np.uint16))[3000:3010]  # type: ignore[arg-type]
        yield from read_pieces(pieces)

    checker = corpus_checks.Checker([file])
    with monkeypatch.context() as patch:
        patch.setattr(corpus_checks, "_read_pieces", evict_and_read)
        left = checker._compare_available(file)
    assert checker.problem is None and left.blocks == file.blocks
    _ = RemoteTokens(to_path(f"{url}.bin"), np.dtype(np.uint16))[:]  # type: ignore[arg-type]
    assert not checker._compare_available(left).blocks and checker.problem is None


def _sums(prefix: str) -> dict[str, Any]:
    (sums,) = json.loads(Path(f"{prefix}.json").read_text())["sha256"].values()
    found: dict[str, Any] = sums
    return found


def test_ranks_share_the_blocks_of_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 1 and 3 see one file, rank 4 another; rank 2 reads no data."""
    shared, other = (1, 10, 5), (9, 10, 5)
    identities = [{"x.bin": shared}, {"x.bin": shared}, {}, {"x.bin": shared}, {"x.bin": other}]
    blocks = [Block(Path("x.bin"), at, at + 1, "") for at in range(10)]
    files = [CorpusFile(Path("x.bin"), None, blocks)]
    compared = {}
    for rank in (0, 1, 3, 4):
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        (file,) = corpus_checks._files_of_rank(files, identities, 4)
        compared[rank] = [block.begin for block in file.blocks]
        done = corpus_checks._files_of_rank(files, identities, 10)
        assert bool(done) == (rank == 4)
    assert compared == {0: [0, 3, 6, 9], 1: [1, 4, 7], 3: [2, 5, 8], 4: [*range(10)]}


def _damaged_run(run_dir: Path, prefix: str, vocab_file: str) -> None:
    corpus_checks.Checker.start = corpus_checks.Checker.run  # type: ignore[method-assign]
    corpus_checks.REST_FACTOR = 0
    with make(Start("gpt2", run_dir, "--train-iters 2 --batch-size 2 --precision fp32"), prefix, vocab_file) as run:
        with pytest.raises((DatasetError, RuntimeError), match=r"x\.bin is damaged in bytes"):
            train(run)
        assert run.state.iteration == 0


def _changed_run(run_dir: Path, prefix: str, vocab_file: str) -> None:
    def change(feature: CorpusChecks, iteration: int) -> None:
        if iteration == 3:
            path = Path(f"{prefix}.bin")
            path.write_bytes(bytes(path.stat().st_size))

    CorpusChecks.before_step = change  # type: ignore[method-assign]
    flags = "--train-iters 6 --save-interval 2 --batch-size 2 --precision fp32"
    with make(Start("gpt2", run_dir, flags), prefix, vocab_file) as run, pytest.raises(RunError, match="iter_0000002"):
        train(run)


def test_a_run_on_a_corpus_that_changes_saves_nothing_more(vocab_file: str, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    _with_tokenizer(prefix, vocab_file)
    on_ranks(1, _changed_run, tmp_path / "run", prefix, vocab_file)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("iter_*"))
    assert saved == ["iter_0000002"]


def _with_tokenizer(prefix: str, vocab_file: str) -> None:
    tokenizer = load_tokenizer(vocab_file)
    about = {"fingerprint": tokenizer.fingerprint, "eod": tokenizer.eod, "sha256": {"x": _sums(prefix)}}
    Path(f"{prefix}.json").write_text(json.dumps(about))


def test_a_run_ends(vocab_file: str, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x")
    _with_tokenizer(prefix, vocab_file)
    change_token(prefix, 11 * BLOCK // 2 + 9)
    on_ranks(1, _damaged_run, tmp_path / "run", prefix, vocab_file)

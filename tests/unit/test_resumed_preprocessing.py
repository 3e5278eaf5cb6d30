"""tools/preprocess_data.py can be resumed after a failure and writes the same files as without the failure."""

import errno
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data_utils import cli
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.tokenizer_training import train_byte_bpe
from megatron.data.indexed_dataset import IndexedDataset
from tests.sentences import SENTENCES
from tests.support import FULL

LINES = [json.dumps({"text": f"第{i}篇文章。" + "春眠不觉晓，处处闻啼鸟。" * (i % 9)}) + "\n" for i in range(400)]
BAD = 300


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of tools/preprocess_data.py, patched to read chunks of 2,000 bytes and to write a journal often."""
    module = importlib.import_module("data_utils.preprocess_data")
    monkeypatch.setattr(module, "JOURNAL_SECONDS", 0)
    honest = cli.chunks
    monkeypatch.setattr(cli, "chunks", lambda source, largest: honest(source, 2000, largest))
    return module


@pytest.fixture
def start(tool: ModuleType, tmp_path: Path, vocab_file: str) -> Callable[..., None]:
    def go(name: str, *more: str, workers: str = "0") -> None:
        argv = ["--input", str(tmp_path / "x.jsonl"), "--vocab-file", vocab_file, "--quiet", "--workers", workers]
        tool.main(tool.build_parser().parse_args([*argv, "--output-prefix", str(tmp_path / name), *more]))

    (tmp_path / "x.jsonl").write_text("".join(LINES))
    return go


def written(folder: Path, name: str) -> dict[str, bytes]:
    return {
        path.name.replace(f"{name}_", "", 1): path.read_bytes().replace(f"{name}_text".encode(), b"a_text")
        for path in sorted(folder.glob(f"{name}_*"))
    }


def kept(folder: Path) -> None:
    assert (folder / "b.part.json").exists()
    assert not (folder / "b.part.json.lock").exists()
    assert (folder / "b_text_document.bin.part").stat().st_size > 1000
    assert not (folder / "b_text_document.idx").exists()


class Disk:
    """A file on a simulated disk that is full after `writes` calls of `write`."""

    def __init__(self, file: Any, writes: int) -> None:
        self._file, self._left = file, writes

    def write(self, content: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.write(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def no_worker(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def die(*args: Any) -> Any:
        yield from [honest(*args)] if args[0].start < 30_000 else []
        raise RuntimeError("a worker process died; the machine may have too little memory")

    honest = tool.tokenize
    monkeypatch.setattr(tool, "tokenize", lambda chunk: next(die(chunk)))


def no_disk(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    honest = IndexedDatasetBuilder.__init__

    def init(self: Any, *args: Any) -> None:
        honest(self, *args)
        self._sizes._file = Disk(self._sizes._file, 20)

    monkeypatch.setattr(IndexedDatasetBuilder, "__init__", init)


def no_disk_for_the_index(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def full(self: Any, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tool, "write_json", full)


def no_input(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def tokenize(chunk: Any) -> Any:
        if chunk.start > 30_000:
            os.rename(chunk.path, folder / "moved")
        return honest(chunk)

    honest = tool.tokenize
    monkeypatch.setattr(tool, "tokenize", tokenize)


ACCIDENTS = {
    no_worker: "a worker process died",
    no_disk: "No space left on device",
    no_disk_for_the_index: "No space left on device",
    no_input: "No such file or directory",
}


@pytest.mark.parametrize("accident", ACCIDENTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("objective", ["text", pytest.param("cpm-t5", marks=FULL)])
def test_only_success_removes_what_is_done(
    tool: ModuleType, start: Callable[..., None], tmp_path: Path, accident: Callable[..., None], objective: str
) -> None:
    start("a", "--objective", objective)
    with pytest.MonkeyPatch.context() as patch:
        accident(tool, patch, tmp_path)
        with pytest.raises(RuntimeError, match=f"{ACCIDENTS[accident]}.*documents are kept"):
            start("b", "--objective", objective)
    if accident is no_input:
        os.rename(tmp_path / "moved", tmp_path / "x.jsonl")
    if objective == "text":
        kept(tmp_path)
    before = json.loads((tmp_path / "b.part.json").read_text())["state"]["count"]["documents"]
    assert before > 50
    start("b", "--objective", objective)
    assert written(tmp_path, "b") == written(tmp_path, "a")
    assert not (tmp_path / "b.part.json").exists()


def test_a_bad_line_is_left_out_by_the_run_that_goes_on(start: Callable[..., None], tmp_path: Path) -> None:
    """The folder of the input also holds the output, whose journal and sidecar are no input."""
    (tmp_path / "x.jsonl").write_text("".join([*LINES[:BAD], "not JSON\n", *LINES[BAD:]]))
    with pytest.raises(RuntimeError, match=f"line {BAD + 1}: the record is not JSON"):
        start("b", "--input", str(tmp_path))
    kept(tmp_path)
    (tmp_path / "x.jsonl.report.json").write_text(json.dumps({"read": 1, "read_chars": 1}, indent=2))
    (tmp_path / "dropped.jsonl").write_text(json.dumps({"reason": "too short", "text": "x"}) + "\n")
    start("b", "--on-error", "skip", "--input", str(tmp_path))
    start("a", "--on-error", "skip", "--input", str(tmp_path))
    assert written(tmp_path, "b") == written(tmp_path, "a")
    assert json.loads((tmp_path / "a_text_document.json").read_text())["bad_lines"] == 1


def test_a_part_that_is_not_what_was_written_is_refused(start: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join([*LINES[:BAD], "not JSON\n", *LINES[BAD:]]))
    with pytest.raises(RuntimeError, match="not JSON"):
        start("b")
    part = tmp_path / "b_text_document.bin.part"
    whole = part.read_bytes()
    for content, message in (
        (whole[:-100], "it is truncated"),
        (whole[:-200] + bytes(200), "SHA-256 differs"),
        (None, "is missing; delete"),
    ):
        part.unlink()
        if content is not None:
            part.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            start("b", "--on-error", "skip")
        assert (tmp_path / "b.part.json").exists()
        part.write_bytes(whole)
    (tmp_path / "b.part.json").write_text("{")
    with pytest.raises(ValueError, match=SENTENCES["is_damaged_delete_it"]):
        start("b")


def test_verify_finds_zeros_in_each_part(
    start: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start("a", "--objective", "cpm-t5")
    tool = importlib.import_module("data_utils.inspect_data")

    def verify(name: str) -> None:
        tool.verify(tool.build_parser().parse_args(["verify", str(tmp_path / name)]))

    verify("a_text_document")
    assert capsys.readouterr().out.count("no problem found") == 3
    for part in ("context", "target", "target_offset"):
        verify(f"a_text_document_{part}")
        assert "checksums" in capsys.readouterr().out
        path = tmp_path / f"a_text_document_{part}.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:400] + bytes(400) + whole[800:])
        for name in ("a_text_document", f"a_text_document_{part}"):
            with pytest.raises(ValueError, match=f"_{part}.bin is damaged in bytes 0 to .*SHA-256 differs"):
                verify(name)
        path.write_bytes(whole)


def test_a_disk_without_room_for_the_journal_promises_nothing(
    tool: ModuleType, start: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = tool.Journal.write

    def write(self: Any, state: dict[str, Any]) -> None:
        if state["count"]["documents"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(self, state)

    start("a")
    with pytest.MonkeyPatch.context() as patch:
        no_disk(tool, patch, tmp_path)
        patch.setattr(tool.Journal, "write", write)
        with pytest.raises(RuntimeError, match=SENTENCES["no_space_left_on_device_0"]):
            start("b")
    start("b")
    assert written(tmp_path, "b") == written(tmp_path, "a")


def test_documents_of_a_resumed_run_end_with_one_token(start: Callable[..., None], tmp_path: Path) -> None:
    """Two tokenizers with the same vocabulary may end documents with different tokens."""
    (tmp_path / "x.jsonl").write_text("".join([*LINES[:BAD], "bad\n", *LINES[BAD:]]))
    for name, eod in {"base": "<|endoftext|>", "chat": "<|im_end|>"}.items():
        folder = tmp_path / name
        folder.mkdir()
        train_byte_bpe(["春眠不觉晓"], str(folder / "tokenizer.json"), 262, "hf", ["<|im_end|>"])
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eod}))
    with pytest.raises(RuntimeError):
        start("b", "--vocab-file", str(tmp_path / "base"))
    with pytest.raises(ValueError):
        start("b", "--vocab-file", str(tmp_path / "chat"), "--on-error", "skip")
    kept(tmp_path)
    start("b", "--vocab-file", str(tmp_path / "base"), "--on-error", "skip")
    found = IndexedDataset(tmp_path / "b_text_document")
    assert {int(found[n][-1]) for n in range(len(LINES))} == {0}


@pytest.mark.parametrize(("first", "second"), [("text", "cpm-t5"), ("cpm-t5", "text")])
def test_a_masked_and_an_ordinary_corpus_do_not_share_a_sidecar(
    start: Callable[..., None], tmp_path: Path, first: str, second: str
) -> None:
    start("b", "--objective", first)
    before = written(tmp_path, "b")
    with pytest.raises(ValueError):
        start("b", "--objective", second)
    assert written(tmp_path, "b") == before
    start("b", "--objective", first)  # the same corpus may be written again
    assert written(tmp_path, "b") == before


def test_a_text_file_with_the_name_of_the_sidecar_is_kept(start: Callable[..., None], tmp_path: Path) -> None:
    raw = tmp_path / "b_text_document.json"
    raw.write_text('[{"text": "one"}]')
    with pytest.raises(ValueError):
        start("b")
    assert raw.read_text() == '[{"text": "one"}]'

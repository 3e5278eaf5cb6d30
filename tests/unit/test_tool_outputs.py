"""If a tool fails, previous outputs stay; the error about a full disk names the file; tools do not follow links."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import zstandard

from data_utils import clean_corpus, inspect_data
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.streams import InputError, open_bytes
from megatron.atomic import atomic_folder, private_temp_folder, remove, write_text
from megatron.checkpointing.leftovers import delete_leftovers
from megatron.config.command_line import parse
from megatron.data.indexed_dataset import DatasetError
from megatron.training.run_folder import write_first_files
from megatron_tools.convert.plain_pickle import load_plain
from megatron_tools.report import report
from megatron_tools.report.runs import named_splits
from megatron_tools.write import evaluate, evaluate_flags
from tests.sentences import SENTENCES
from tests.support import ROOT

GOOD = [{"text": f"Document number {i} of this corpus, long enough to stay in it. " * 3} for i in range(400)]


def _corpus(folder: Path, *more: str) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in GOOD) + "".join(f"{line}\n" for line in more))
    return path


# ------------------------------------------------------------ runs that fail


@pytest.mark.parametrize("place", ["folder", "none/x.json"])
def test_an_error_names_the_output_and_not_its_temporary_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as error:
        write_text(tmp_path / place, "x")
    assert error.value.filename == str(tmp_path / place)


def test_numbers_are_printed_even_if_they_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "load_subject", lambda args: None)
    monkeypatch.setattr(evaluate, "measure_cloze", lambda *_: {"accuracy": 0.25})
    args = evaluate_flags.build_parser().parse_args(
        ["--load", "x", "--cloze", "x", "--json", str(tmp_path / "none" / "x.json")]
    )
    with pytest.raises(FileNotFoundError):
        evaluate.main(args)
    assert "accuracy             0.2500" in capsys.readouterr().out


def test_a_cleaning_run_that_fails_leaves_the_files_of_the_run_before(tmp_path: Path) -> None:
    def clean(corpus: Path) -> None:
        argv = [
            "--input",
            str(corpus),
            "--output",
            str(tmp_path / "clean.jsonl"),
            "--dropped",
            str(tmp_path / "dropped.jsonl"),
        ]
        clean_corpus.main(clean_corpus.build_parser().parse_args([*argv, "--workers", "0", "--quiet"]))

    clean(_corpus(tmp_path, json.dumps({"text": "short"})))
    before = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "corpus.jsonl"}
    assert "short" in before["dropped.jsonl"]
    with pytest.raises(ValueError, match="corpus.jsonl, line 402"):
        clean(_corpus(tmp_path, json.dumps({"text": "tiny"}), "{not JSON"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "corpus.jsonl"} == before


def _on_a_small_disk() -> None:
    """Limit the size of files that this process writes to 16 kB, to simulate a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))


@pytest.mark.parametrize("which", ["clean.jsonl", "clean.jsonl.gz", "dropped.jsonl", "pair"])
def test_a_full_disk_is_named_by_its_file(tmp_path: Path, vocab_file: str, which: str) -> None:
    corpus, out = _corpus(tmp_path), tmp_path / "out"
    argv = [
        "tools/clean_corpus.py",
        "--input",
        str(corpus),
        "--output",
        str(out / which),
        "--quiet",
        "--no-shuffle",
        "--off",
        "repeated",
    ]
    if which == "dropped.jsonl":
        argv[4] = str(out / "clean.jsonl")
        argv += ["--min-chars", "100000", "--dropped", str(out / which)]
    elif which == "clean.jsonl.gz":
        noise = [{"text": os.urandom(600).hex()} for _ in range(300)]
        corpus.write_text("".join(json.dumps(each) + "\n" for each in noise))
    elif which == "pair":
        argv = [
            "tools/preprocess_data.py",
            "--input",
            str(corpus),
            "--vocab-file",
            vocab_file,
            "--output-prefix",
            str(out / which),
        ]
    done = subprocess.run(
        [sys.executable, *argv, "--workers", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=_on_a_small_disk,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert str(out / which) in done.stderr.strip().splitlines()[-1], done.stderr
    assert which == "pair" or list(out.iterdir()) == []


def test_a_killed_tool_leaves_no_warning_of_python(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(each) + "\n" for each in GOOD) * 200)
    argv = [
        "tools/clean_corpus.py",
        "--input",
        str(corpus),
        "--output",
        str(tmp_path / "clean.jsonl"),
        "--workers",
        "2",
        "--quiet",
    ]
    tool = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.tmp")) and time.monotonic() < deadline:  # wait until workers start
        time.sleep(0.02)
    time.sleep(0.5)
    tool.send_signal(signal.SIGKILL)
    assert tool.communicate(timeout=60)[1] == ""


# -------------------------------------------------------------------- links


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    checkpoints, target = tmp_path / "checkpoints", tmp_path / "elsewhere"
    checkpoints.mkdir()
    for name in ("latest.tmp", "iter_0000002.tmp"):
        (checkpoints / name).symlink_to(target)
    write_text(checkpoints / "latest", "iter_0000002\n", temporary=checkpoints / "latest.tmp")
    assert (checkpoints / "latest").read_text() == "iter_0000002\n" and not target.exists()
    (checkpoints / "latest.tmp").symlink_to(target)
    delete_leftovers(checkpoints)
    assert [path.name for path in checkpoints.iterdir()] == ["latest"]


def test_what_a_link_leads_to_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    remove(tmp_path / "link")
    assert (tmp_path / "folder" / "file").exists() and not (tmp_path / "link").exists()
    remove(tmp_path / "folder")
    remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard", "trace", "profile"])
def test_a_by_product_that_is_a_link_is_refused(tmp_path: Path, vocab_file: str, name: str) -> None:
    run, target = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"run/{name} is a symbolic link.*{target}"):
        write_first_files(parse(["--vocab-file", vocab_file]), run, 0)
    assert [path.name for path in run.iterdir()] == [name]


def test_a_plot_replaces_a_link(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "target").write_text("precious")
    (tmp_path / "loss.png").symlink_to(tmp_path / "target")
    report.draw_losses([{"split": "train", "iteration": 1, "lm_loss": 1.0}], {}, tmp_path / "loss.png", [])
    assert (tmp_path / "target").read_text() == "precious"
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG" and not (tmp_path / "loss.png").is_symlink()


@pytest.mark.parametrize("fault", ["link", "writable", "file"])
def test_a_temporary_folder_that_others_could_fill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = private_temp_folder("orders")
    assert path.stat().st_mode & 0o777 == 0o700 and private_temp_folder("orders") == path
    path.rmdir()
    if fault == "link":
        (tmp_path / "theirs").mkdir()
        path.symlink_to(tmp_path / "theirs")
    elif fault == "writable":
        path.mkdir()
        path.chmod(0o777)
    else:
        path.touch()
    with pytest.raises(ValueError, match=str(path)):
        private_temp_folder("orders")


# ------------------------------------------------------------------- inputs

BOMB = 1 << 27
COMPRESS = {
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".zst": zstandard.ZstdCompressor().compress,
    ".gz": lambda data: gzip.compress(data, 1),
}


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"bomb.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](bytes(BOMB)))
    code = (
        "import re, sys; from data_utils.streams import open_bytes\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "with open_bytes(sys.argv[1]) as file: size = sum(map(len, iter(lambda: file.read(1 << 20), b'')))\n"
        "print(size, peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    size, kilobytes = map(int, done.stdout.split())
    assert size == BOMB and kilobytes < 70_000


@pytest.mark.parametrize("ending", COMPRESS)
def test_streams_come_back_whole_and_cuts_are_noticed(tmp_path: Path, ending: str) -> None:
    first, second = os.urandom(50_000) + bytes(3 << 20), b"second stream" * 1000
    path = tmp_path / f"x.txt{ending}"
    path.write_bytes(COMPRESS[ending](first) + COMPRESS[ending](second))
    with open_bytes(str(path)) as file:
        assert file.read() == first + second
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises((EOFError, OSError, InputError)), open_bytes(str(path)) as file:
        file.read()


def test_an_xz_that_asks_for_a_dictionary_of_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt.xz"
    path.write_bytes(_huge_dictionary())
    with pytest.raises(lzma.LZMAError), open_bytes(str(path)) as file:
        file.read()


def _huge_dictionary() -> bytes:
    """Return an .xz file whose block header claims a dictionary of 4 GiB and has a valid checksum."""
    import zlib

    whole = bytearray(lzma.compress(b"small"))
    at = 12  # start of the block header: its size, flags, filter id, size of properties, dictionary size
    size = (whole[at] + 1) * 4
    assert whole[at + 2 : at + 4] == b"\x21\x01"
    whole[at + 4] = 40  # 40 encodes a dictionary of 4 GiB - 1
    whole[at + size - 4 : at + size] = zlib.crc32(bytes(whole[at : at + size - 4])).to_bytes(4, "little")
    return bytes(whole)


def test_verify_finds_negative_ids_without_a_vocabulary(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "pair")) as builder:
        builder.add_document([1, 2, 3])
        builder.add_document([4, -1])
    args = inspect_data.build_parser().parse_args(["verify", str(tmp_path / "pair")])
    with pytest.raises(DatasetError, match=SENTENCES["document_1_token_id_1"]):
        inspect_data.verify(args)


class _Runs:
    def __reduce__(self) -> object:
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_what_a_pickle_asks_for_is_named_in_every_protocol(tmp_path: Path, protocol: int, zipped: bool) -> None:
    path = tmp_path / "model.pt"
    torch.save(
        {"weight": torch.ones(2), "more": _Runs()},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(ValueError, match=rf"{path} requests (posix|os).system"):
        load_plain(path)
    torch.save({"weight": torch.ones(2)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    if protocol <= 3:
        assert torch.equal(load_plain(path)["weight"], torch.ones(2))
        return
    try:
        assert torch.equal(load_plain(path)["weight"], torch.ones(2))
    except ValueError as error:
        assert f"protocol {protocol}" in str(error)


def test_a_plain_pickle_is_named_too(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(pickle.dumps(_Runs(), protocol=4))
    with pytest.raises(ValueError, match=r"model.pt"):
        load_plain(path)


def test_named_splits_of_losses_are_not_those_of_tasks() -> None:
    rows = [{"split": split} for split in ("train", "valid", "valid/web", "train/web", "eval/lambada", "valid/web")]
    assert named_splits(rows, "train", "valid", "test") == ["train/web", "valid/web"]
    assert named_splits(rows, "eval") == ["eval/lambada"]


def test_a_folder_behind_a_link_is_filled_and_a_mount_point_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with atomic_folder(tmp_path / "link") as there:
        (there / "a").write_text("x")
    assert (tmp_path / "disk" / "a").read_text() == "x" and (tmp_path / "link").is_symlink()
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(FileExistsError, match="mount point"), atomic_folder(tmp_path / "new"):
        pass

"""Data tools that run on several machines write the same bytes as on one machine."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_utils.files import find_files
from data_utils.parallel import ordered_map
from tests.sentences import SENTENCES
from tests.support import FULL, ROOT

Tool = Callable[..., None]


@pytest.fixture
def tool() -> Tool:
    def run(name: str, *argv: object) -> None:
        module = importlib.import_module(f"data_utils.{name}")
        args = module.build_parser().parse_args([*map(str, argv)])
        args.function(args) if name == "inspect_data" else module.main(args)

    return run


def shards(folder: Path) -> list[Path]:
    """Write three files with near-duplicates across files; return their paths."""
    dice = random.Random(2)
    texts = ["".join(dice.choices("春眠不觉晓处闻啼鸟夜来风雨声花落知多少", k=200)) for _ in range(60)]
    texts += [text[:100] + "改" + text[101:] for text in texts[:30]]
    dice.shuffle(texts)
    paths = [folder / f"part{i}.jsonl" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[30 * i : 30 * i + 30]))
    return paths


def same(folder: Path, one: str, other: str) -> None:
    for ending in ("bin", "idx"):
        assert (folder / f"{one}.{ending}").read_bytes() == (folder / f"{other}.{ending}").read_bytes()


def test_shards_and_merge_are_one_run(tool: Tool, tmp_path: Path, vocab_file: str) -> None:
    """Cleaning and tokenizing shards as separate jobs, then merging, gives the bytes of a single run."""
    pytest.importorskip("rensa")
    paths, quiet = shards(tmp_path), ("--workers", 0, "--quiet")
    near = (*quiet, "--near-duplicates", "--min-chars", 20)
    tool("clean_corpus", "--input", *paths, "--output", tmp_path / "whole.jsonl", *near)
    for i, path in enumerate(paths):
        tool("clean_corpus", "--input", path, "--output", tmp_path / f"cleaned{i}.jsonl", "--no-shuffle", *quiet)
    tool("clean_corpus", "--input", f"{tmp_path}/cleaned*.jsonl", "--output", tmp_path / "all.jsonl", *near)
    assert (tmp_path / "all.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert (tmp_path / "all.jsonl").read_text().count("\n") == 60

    common = ("--vocab-file", vocab_file, *quiet)
    tool("preprocess_data", "--input", *paths, "--output-prefix", tmp_path / "whole", *common)
    for i, path in enumerate(paths):
        tool("preprocess_data", "--input", path, "--output-prefix", tmp_path / f"data{i}", *common)
    parts = sorted(tmp_path.glob("data*_text_document.bin"))
    tool("inspect_data", "merge", *parts, "--output", tmp_path / "merged")
    same(tmp_path, "whole_text_document", "merged")


def test_a_folder_of_thousands_of_files_has_one_order(tmp_path: Path) -> None:
    names = [f"{i % 7}/part{i:05}.jsonl" for i in range(3000)]
    for name in random.Random(1).sample(names, len(names)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [source.path for source in find_files([str(tmp_path)])]
    assert found == [str(tmp_path / name) for name in sorted(names)]


class _Told:
    marker: str


def begin(marker: str) -> None:
    _Told.marker = marker


def square(number: int) -> int:
    if number == 7 and not os.path.exists(_Told.marker):
        Path(_Told.marker).touch()
        os._exit(1)  # simulates the loss of a machine
    if number == 30:
        raise ValueError("thirty is no number")
    return number * number


@FULL
def test_ray_gives_what_one_machine_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ordered_map` on Ray keeps the order, survives a worker's death and raises the function's errors.

    It needs no more CPUs than the cluster has, and starts a cluster of its own in spite of RAY_ADDRESS.
    """
    pytest.importorskip("ray", reason="needs ray")
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.2:6379")
    workers = (os.cpu_count() or 1) + 1
    found = []
    with pytest.raises(ValueError, match=SENTENCES["thirty_is_no_number"]):
        for each in ordered_map(square, range(60), workers, begin, (str(tmp_path / "marker"),), "local"):
            found.append(each)
    assert found == [number * number for number in range(30)]
    assert (tmp_path / "marker").exists()


@FULL
def test_the_tools_on_ray_write_the_same_bytes(tool: Tool, tmp_path: Path, vocab_file: str) -> None:
    pytest.importorskip("ray", reason="needs ray")
    pytest.importorskip("rensa")
    paths = shards(tmp_path)
    for name, who in (("a", ("--workers", 0)), ("b", ("--workers", 2, "--ray", "local"))):
        tool(
            "clean_corpus",
            "--input",
            *paths,
            "--output",
            tmp_path / f"{name}.jsonl",
            "--near-duplicates",
            "--quiet",
            *who,
        )
        argv = ("--input", *paths, "--output-prefix", tmp_path / name, "--vocab-file", vocab_file, "--quiet")
        tool("preprocess_data", *argv, *who)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    same(tmp_path, "a_text_document", "b_text_document")


def _fail_to_begin() -> None:
    raise OSError("the tokenizer cannot be read")


def test_a_worker_that_cannot_begin_points_to_its_own_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="printed no error above"):
        list(ordered_map(abs, range(3), 1, _fail_to_begin, (), None))
    assert "the tokenizer cannot be read" in capfd.readouterr().err


IDLE_WORKERS = """
import sys, time
from data_utils.parallel import ordered_map
def start(): pass
def items():
    yield from range(6)  # more than 2 workers get before the first result is needed
    print("ready", flush=True)
    time.sleep(60)
if __name__ == "__main__":
    try:
        list(ordered_map(abs, items(), 2, start, (), None))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def test_ctrl_c_prints_no_traceback_of_idle_workers(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(IDLE_WORKERS)
    tool = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert tool.stdout is not None and tool.stdout.readline() == "ready\n"
    time.sleep(1)  # until both workers wait
    os.killpg(tool.pid, signal.SIGINT)  # as a terminal does
    _, printed = tool.communicate(timeout=30)
    assert (tool.returncode, printed) == (130, "")

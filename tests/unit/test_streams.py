"""A run that cannot write to stdout or stderr continues and reports the broken stream on the other stream."""

import errno
import io
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_utils.cli import Parser
from data_utils.cli import run as run_tool
from megatron.config.messages import describe_error
from megatron.streams import OPEN_FILES, GuardedStream, NamedStdout, guard_streams
from megatron.training.entry import run as train
from tests.support import FULL, ROOT

FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing(io.StringIO):
    """A text stream whose writes raise `error`, unless it is None."""

    error: Exception | None = FULL_DISK

    def write(self, text: str) -> int:
        if self.error:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("error", [FULL_DISK, BrokenPipeError(errno.EPIPE, "Broken pipe"), ValueError("closed file")])
def test_the_other_stream_names_it_once(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    bad, good = Failing(), io.StringIO()
    bad.error = error
    for each in ("stdout", "stderr"):
        monkeypatch.setattr(sys, each, bad if each == name else good)
    with guard_streams("training continues", "stdout", "stderr"):
        for _ in range(3):
            print("a line", file=getattr(sys, name), flush=True)
    words = {"stdout": "standard output", "stderr": "standard error"}[name]
    assert good.getvalue().count(words) == 1 and "training continues" in good.getvalue()
    assert getattr(sys, name) is bad


def test_what_fails_again_after_it_was_written_is_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = Failing(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", good)
    stream = GuardedStream("stdout", bad, "training continues")
    stream.write("lost")
    bad.error = None
    stream.write("written")
    bad.error = FULL_DISK
    stream.write("lost")
    assert (bad.getvalue(), good.getvalue().count("note: ")) == ("written", 2)


def test_a_stream_without_an_encoding_for_a_character_gets_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = GuardedStream("stdout", io.TextIOWrapper(raw, encoding="ascii"), "training continues")
    stream.write("saved 词")
    stream.flush()
    assert raw.getvalue() == b"saved \\u8bcd"


def test_both_streams_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Failing())
    monkeypatch.setattr(sys, "stderr", None)
    with guard_streams("training continues", "stdout", "stderr"):
        print("a line", flush=True)
        print("a line", file=sys.stderr, flush=True)


def test_the_result_of_a_tool_names_the_stream_that_it_cannot_go_to() -> None:
    with pytest.raises(OSError) as failed:
        NamedStdout(Failing()).write("a result")
    assert failed.value.filename == "standard output"


def test_closed_streams_are_not_taken_by_files(tmp_path: Path) -> None:
    """A new file does not get the descriptor of a closed stdout or stderr; otherwise, C++ code would print into it."""
    code = (
        "from megatron.streams import guard_streams\n"
        "with guard_streams('', 'stdout', 'stderr'): open('file', 'w').close(); "
        "print(open('file').fileno())"
    )
    script = (
        f"cd {tmp_path} && PYTHONPATH={ROOT} {sys.executable} -c \"import os; exec(os.environ['CODE']); "
        "open('number', 'w').write(str(os.open('file', 0)))\" <&- >&- 2>&-"
    )
    subprocess.run(["bash", "-c", script], env={**os.environ, "CODE": code}, check=True, timeout=60)
    assert int((tmp_path / "number").read_text()) > 2


def _full_stdout(argv: list[str]) -> "subprocess.CompletedProcess[str]":
    with open("/dev/full", "w") as full:
        return subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)


def _closed(argv: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", '"$@" >&- 2>&-', "bash", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def _head(argv: list[str]) -> "subprocess.CompletedProcess[str]":
    script = 'set -o pipefail; "$@" | head -1'
    return subprocess.run(["bash", "-c", script, "bash", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("how", [_closed, *(pytest.param(each, marks=FULL) for each in (_full_stdout, _head))])
def test_a_run_trains_and_saves(
    tmp_path: Path, tiny_data: str, vocab_file: str, how: "Callable[[list[str]], subprocess.CompletedProcess[str]]"
) -> None:
    argv = [
        sys.executable,
        "pretrain_gpt2.py",
        "--data-path",
        tiny_data,
        "--vocab-file",
        vocab_file,
        "--split",
        "8,2",
        "--num-layers",
        "1",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--seq-length",
        "16",
        "--batch-size",
        "2",
        "--log-interval",
        "1",
        "--precision",
        "fp32",
        "--no-tensorboard",
        "--train-iters",
        "3",
        "--eval-iters",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = how(argv)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().startswith("iter_0000003")
    assert (how is _closed) or "standard output" in done.stderr


def test_a_tool_whose_result_cannot_be_written_fails_by_name(tmp_path: Path, tiny_data: str) -> None:
    done = _full_stdout([sys.executable, "tools/inspect_data.py", "info", tiny_data])
    assert done.returncode == 1 and "standard output" in done.stderr and "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("start", [lambda: train(None), lambda: run_tool(print, Parser("", ""))])  # type: ignore[arg-type]
def test_a_run_and_a_tool_may_open_many_files(start: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "-h"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    with pytest.raises(SystemExit):
        start()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised == (min(OPEN_FILES, before[1]), before[1])


def test_too_many_open_files_name_the_limit() -> None:
    assert "ulimit -n" in describe_error(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))

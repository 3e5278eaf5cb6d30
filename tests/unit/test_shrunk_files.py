"""A corpus that becomes shorter under a run, and a data worker that ends, give one sentence that names them."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils.documents import chunks, documents
from data_utils.files import Source
from data_utils.indexed_writer import IndexedDatasetBuilder
from data_utils.streams import InputError
from megatron.config.command_line import parse
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import DatasetError, IndexedDataset
from megatron.data.sampler import ConsecutiveSampler, build_loader
from megatron.data.workers import describe_worker_end
from megatron.ranks.errors import one_line_error
from megatron.tasks import TASKS
from megatron.training import complaints, entry
from megatron_tools.launch import describe_signal
from tests.support import ROOT

TOKENS = 100_000
READER = """
import sys
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.data.indexed_dataset import IndexedDataset
dataset = GPT2Dataset(IndexedDataset(sys.argv[1]), range(100), 128, 7, "train")
dataset[0]
open(sys.argv[1] + sys.argv[2], "r+b").truncate(100)
try:
    [dataset[n] for n in range(200)]
except ValueError as error:
    print(error)
"""


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for _ in range(100):
            builder.add_document([5] * (TOKENS // 100))
    return str(tmp_path / "text")


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_file_that_became_shorter_is_named(end: str, prefix: str) -> None:
    """The test reads in another process, because the signal SIGBUS would kill it."""
    size = os.path.getsize(prefix + end)
    argv = [sys.executable, "-c", READER, prefix, end]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{prefix}{end}" in done.stdout and str(size) in done.stdout and "100 now" in done.stdout


def test_a_deleted_file_stays_readable(prefix: str) -> None:
    dataset = GPT2Dataset(IndexedDataset(prefix), range(100), 128, 7, "train")
    os.unlink(f"{prefix}.bin")
    assert all(int(value) == 5 for value in dataset[3]["text"])


def test_a_worker_that_opens_other_files_than_the_run_says_so(prefix: str) -> None:
    """Workers of an evaluation start while the run trains. The order of samples is that of the old files."""
    pickled = pickle.dumps(IndexedDataset(prefix))
    assert pickle.loads(pickled).num_tokens == TOKENS
    with IndexedDatasetBuilder(f"{prefix}.new", np.uint16) as builder:
        for _ in range(50):
            builder.add_document([6] * (TOKENS // 50))
    for ending in ("bin", "idx"):
        os.replace(f"{prefix}.new.{ending}", f"{prefix}.{ending}")
    with pytest.raises(DatasetError, match=prefix):
        pickle.loads(pickled)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_text_that_is_replaced_while_it_is_read_is_refused(in_place: bool, tmp_path: Path) -> None:
    """Each worker opens the path again; the ranges of bytes are those of the old file."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "old"}\n' * 100)
    first, second, *_ = chunks(Source(str(path)), 400)
    assert len(list(documents(first))) > 10
    new = '{"text": "newer"}\n' * 100
    if in_place:
        path.write_text(new)
    else:
        other = tmp_path / "new"
        other.write_text(new)
        other.rename(path)
    with pytest.raises(InputError, match=str(path)):
        list(documents(second))


def test_a_worker_that_fails_and_one_that_is_killed(prefix: str) -> None:
    dataset = GPT2Dataset(IndexedDataset(prefix), range(100), 128, 7, "train")
    others = set(multiprocessing.active_children())
    batches = iter(build_loader(dataset, ConsecutiveSampler(2, 1, 0, 1), num_workers=1))
    next(batches)
    (worker,) = {*multiprocessing.active_children()} - others
    time.sleep(1)  # the worker has read ahead and waits: a read during the cut would end it by SIGBUS
    os.truncate(f"{prefix}.bin", 1000)
    with pytest.raises(DatasetError) as failed:
        for _ in range(10):
            next(batches)
    text = one_line_error(failed.value)
    assert text.startswith(f"{prefix}.bin ") and "Traceback" not in text
    with pytest.raises(RuntimeError) as killed:
        os.kill(worker.pid, signal.SIGKILL)
        time.sleep(5)
        next(batches)
    assert str(worker.pid) in (describe_worker_end(killed.value) or "")
    assert describe_worker_end(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize("shrunk", [True, False])
def test_the_end_of_a_worker_is_one_sentence(
    shrunk: bool, prefix: str, vocab_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def set_up(*_: Any) -> None:
        if shrunk:
            os.truncate(f"{prefix}.bin", 1000)
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that ...")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(entry, "set_up", set_up)
    monkeypatch.setattr(complaints, "exit_now", leave)
    argv = ["--data-path", prefix, "--vocab-file", vocab_file]
    task = TASKS["gpt2"]()
    with pytest.raises(SystemExit):
        entry.run(task, config=parse(argv, task.defaults))
    (line,) = capsys.readouterr().err.splitlines()
    assert "4711" in line and (f"{prefix}.bin" in line) == shrunk


SHARED_MEMORY_ERRORS = {
    "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)": "--num-workers 0",
    "NCCL error: unhandled system error\nError while creating shared memory segment /dev/shm/nccl-4gVxOb "
    "(size 33030528), error: No space left on device (28)": "--ipc=host",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376": None,
}


@pytest.mark.parametrize("text", SHARED_MEMORY_ERRORS)
def test_only_torchs_error_about_shared_memory_concerns_the_data_set(text: str) -> None:
    error = RuntimeError(text)
    advice = SHARED_MEMORY_ERRORS[text]
    words = describe_worker_end(error) or ""
    assert [flag for flag in ("--num-workers 0", "--ipc=host") if flag in words] == [advice] * bool(advice)
    assert complaints.is_bug(error) == (advice is None)


def test_the_launcher_names_the_signal() -> None:
    assert "SIGBUS" in describe_signal(7) and "SIGKILL" in describe_signal(9) and "SIGSEGV" in describe_signal(11)
    assert "200" in describe_signal(200)

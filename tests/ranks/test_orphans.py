"""No rank or data-loader worker outlives its launcher, whenever the launcher is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import FULL, ROOT

MARK = "TEST_OF_ORPHANS"


def living(mark: str) -> list[int]:
    """Return the ids of the processes that have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_for(what: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    for pid in living(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(code: str, mark: str, *argv: str, **env: str) -> "subprocess.Popen[str]":
    whole = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **env}
    return subprocess.Popen([sys.executable, "-c", code, *argv], env=whole, text=True, stdout=subprocess.PIPE)


RANK = """
import os, subprocess, sys, time
from tds import parent_death  # which imports neither torch nor DeepSpeed
if sys.argv[1] == "launcher":
    if "ours" in sys.argv: os.environ["TDS_LAUNCHER"] = str(os.getpid())
    if "theirs" in sys.argv: os.environ["TORCHELASTIC_RUN_ID"] = "1"
    subprocess.Popen([sys.executable, "-c", os.environ["CODE"], "rank", *sys.argv[2:]])
else:
    if "late" in sys.argv: time.sleep(1.5)  # importing, while the launcher is killed
    parent_death.end_with_launcher()
    print("watching", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("kind", ["ours", "theirs", "by hand", "ours late"])
def test_a_rank_ends_with_its_launcher(mark: str, kind: str) -> None:
    os.chdir(ROOT)
    launcher = start(RANK, mark, "launcher", *kind.split(), CODE=RANK)
    assert launcher.stdout is not None
    if "late" in kind:
        assert wait_for(lambda: len(living(mark)) == 2, 10)
    else:
        assert launcher.stdout.readline() == "watching\n"
    launcher.kill()
    launcher.wait()
    ended = wait_for(lambda: not living(mark), 5 if kind != "by hand" else 2)
    assert ended == (kind != "by hand")


READER = """
import multiprocessing, os, sys, time
import torch
from megatron.data.sampler import ConsecutiveSampler, build_loader
class Data(torch.utils.data.Dataset):
    def __init__(self): self.state = 1
    def __len__(self): return 100
    def __getitem__(self, n): return n
    def __setstate__(self, state):  # a worker comes up slowly
        if sys.argv[-1] == "slow": print("coming up", flush=True); time.sleep(1.5)
if __name__ == "__main__":
    batches = iter(build_loader(Data(), ConsecutiveSampler(1, 1, 0, 1), 1))
    if sys.argv[-1] != "slow": print("read", next(batches), flush=True)
    time.sleep(30)
"""


@pytest.mark.parametrize("phase", ["slow", pytest.param("reading", marks=FULL)])
def test_a_loaders_worker_ends_with_its_rank(mark: str, tmp_path: Path, phase: str) -> None:
    (tmp_path / "reader.py").write_text(READER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark}
    reader = subprocess.Popen(
        [sys.executable, str(tmp_path / "reader.py"), phase], env=env, text=True, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == ("coming up\n" if phase == "slow" else "read tensor([0])\n")
    reader.kill()
    reader.wait()
    assert wait_for(lambda: not living(mark), 4), living(mark)


@FULL
@pytest.mark.parametrize("seconds", [3, 6, 9, 12, None])
def test_nothing_is_left_of_a_run(
    mark: str, tmp_path: Path, tiny_data: str, vocab_file: str, seconds: float | None
) -> None:
    """The ranks and data-loader workers of a killed launcher end.

    seconds: time from the start to the kill; None: kill during training.
    """
    argv = (
        f"tools/launch.py --standalone --nproc-per-node 2 pretrain_gpt2.py --run-dir {tmp_path} --data-path "
        f"{tiny_data} "
        f"--vocab-file {vocab_file} --split 1 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
        f"--log-interval 1 --precision fp32 --num-workers 1 --eval-iters 0 --no-tensorboard"
    )
    env = {**os.environ, MARK: mark}
    launcher = subprocess.Popen([sys.executable, *argv.split()], cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    if seconds is None:
        assert wait_for(lambda: (tmp_path / "metrics.jsonl").is_file(), 120)
    else:
        time.sleep(seconds)
    launcher.kill()
    launcher.wait()
    assert wait_for(lambda: not living(mark), 15), living(mark)

"""A failing run prints one report and a run stopped by Ctrl-C one line, without tracebacks or messages of C++."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import FULL, ROOT, ends_of_script, free_port

RANKS = 3
SCRIPT = """
import os, signal, sys, time, torch
import tds as deepspeed
from deepspeed.pipe import PipelineModule
deepspeed.init_distributed(auto_mpi_discovery=False)
import tds.diagnose
rank, kind, victim = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])

if kind == "freeze":
    tds.diagnose.SILENCE_SECONDS = 2.0
if kind == "end":
    tds.diagnose.POLL_SECONDS = 1e-5  # the watchdog's thread is always in the middle of C++


class Layer(torch.nn.Linear):
    count = 0

    def forward(self, x):
        Layer.count += 1
        if kind == "raise" and rank == victim and Layer.count == 6:
            raise ArithmeticError("the layer broke")
        if kind == "memory" and rank == victim and Layer.count == 6:
            torch.empty(10**15)
        if kind == "freeze" and rank == victim and Layer.count == 6:
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "wait":
            time.sleep(0.05)
        return super().forward(x)

layers = [Layer(4, 4) for _ in range(int(os.environ["WORLD_SIZE"]))]
net = PipelineModule(layers, num_stages=len(layers), loss_fn=torch.nn.MSELoss(), partition_method="uniform")
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config={
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "steps_per_print": None,
    "pipeline": {"timeout": 2.0 if kind == "freeze" else 600}})

def batches():
    while True:
        yield torch.ones(2, 4), torch.zeros(2, 4)

for step in range(3 if kind == "end" else 10**6):
    engine.train_batch(batches())
    if step == 1:
        print("under way", flush=True)
"""


def _start(folder: Path, *argv: str, ranks: int = RANKS) -> list["subprocess.Popen[str]"]:
    """Start one process per rank with `SCRIPT`, without a launcher, so that rank 0 hosts torch's TCPStore."""
    (folder / "train.py").write_text(SCRIPT)
    port = free_port()
    meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "train.py", *argv],
            cwd=folder,
            env={**os.environ, **meet, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]


def _ends(ranks: list["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    try:
        return [(p.wait(120), p.communicate()[1]) for p in ranks]
    finally:
        for p in ranks:
            p.kill()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=FULL)])
def test_a_layer_that_raises_is_reported_once(tmp_path: Path, victim: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ends = ends_of_script(RANKS, tmp_path, "train.py", "raise", str(victim))
    assert [code for code, _ in ends] == [1] * RANKS
    report, *others = [words for _, words in ends]
    assert others == [""] * (RANKS - 1)
    assert report.startswith(f"pipeline stopped: rank {victim} raised ArithmeticError: the layer broke\n--- rank 0")
    assert report.count("ArithmeticError: the layer broke") == 2  # in the first line and below the stack
    assert report.count("--- rank") == RANKS
    assert "Exception raised from" not in report  # the report has no C++ stack
    assert "does not answer" not in report
    assert 'train.py", line' in report  # the stack includes the line of the user's script


@FULL
def test_want_of_memory_is_one_line(tmp_path: Path) -> None:
    ends = _ends(_start(tmp_path, "memory", "1"))
    assert [code for code, _ in ends] == [1] * RANKS
    (line,) = "".join(words for _, words in ends).splitlines()
    assert line.startswith("pipeline stopped: rank 1 is out of memory (")
    assert "stage 1, in Forward of micro-batch" in line
    assert "train_micro_batch_size_per_gpu" in line


@FULL
def test_a_frozen_process_that_keeps_the_store(tmp_path: Path) -> None:
    """If the process that hosts torch's store freezes, the other ranks end with an error that names this process."""
    ranks = _start(tmp_path, "freeze", "0")
    try:
        assert [p.wait(120) for p in ranks[1:]] == [1, 1]
        for rank, p in enumerate(ranks[1:], 1):
            words = p.communicate()[1]
            assert f"pipeline stopped: rank {rank}, stage {rank}, in Recv" in words
            assert "hosts the ranks' store (rank 0, or the launcher) does not answer" in words
            assert 'train.py", line' in words
    finally:
        for p in ranks:
            p.kill()
            p.communicate()


@pytest.mark.parametrize("who", [pytest.param("all of them", marks=FULL), "one of them"])
def test_ctrl_c_is_one_line(tmp_path: Path, who: str) -> None:
    ranks = _start(tmp_path, "wait", "0", ranks=2)
    for p in ranks:
        assert p.stdout is not None
        assert any("under way" in line for line in p.stdout)
    for p in ranks if who == "all of them" else ranks[1:2]:
        p.send_signal(signal.SIGINT)
    ends = _ends(ranks)
    assert all(code in (130, -signal.SIGINT) for code, _ in ends), ends
    words = "".join(words for _, words in ends)
    assert len(words.splitlines()) == 1, words
    assert "was interrupted (Ctrl-C)" in words


def test_a_script_that_simply_ends_ends_well(tmp_path: Path) -> None:
    """A script that ends without destroying process groups exits with code 0 and is not aborted by C++ (code -6)."""
    assert _ends(_start(tmp_path, "end", "0", ranks=2)) == [(0, "")] * 2

"""Training runs on the hosts of a lab: the body of a rank, which does what pretrain_gpt2.py does."""

import json
import shlex
import time
from pathlib import Path

from megatron.tasks import TASKS
from megatron.training import Feature, run
from tests.checkpoints.runs import MODELS

from .lab import Lab
from .ranks import Rank, start_ranks


class Pace(Feature):
    """Part of a run that makes each iteration take some seconds longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def before_step(self, iteration: int) -> None:
        time.sleep(self._seconds)


def train_gpt2(flags: str, seconds: float = 0.0) -> None:
    """Train a small GPT-2 with further flags. seconds: time that each iteration sleeps."""
    run(TASKS["gpt2"](), shlex.split(f"{MODELS['gpt2']} {flags}"), features=[Pace(seconds)])


def start_gpt2(
    net: Lab, folder: Path, flags: str, data: str, vocab_file: str, seconds: float = 0.0, **env: str
) -> list[Rank]:
    """Start `train_gpt2` as one rank on each host, with the run directory `folder`/run; logs are in `folder`."""
    where = f"--run-dir {folder}/run --data-path {data} --vocab-file {vocab_file}"
    return start_ranks(net, folder, train_gpt2, f"{flags} {where}", seconds, **env)


def iterations(run_dir: Path) -> int:
    """Return how many iterations of a run are in its metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_iteration(run_dir: Path, iteration: int, ranks: list[Rank], timeout: float = 60.0) -> None:
    """Wait until a run has logged an iteration. Raises AssertionError if a rank ends before."""
    deadline = time.monotonic() + timeout
    while iterations(run_dir) < iteration:
        assert time.monotonic() < deadline, "the run is too slow"
        assert all(rank.is_alive for rank in ranks), [rank.log.read_text() for rank in ranks]
        time.sleep(0.05)


def results_of(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return iteration -> (loss, gradient norm); of an iteration that was repeated after a resume, the last values."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"]) for row in rows if row["split"] == "train"}

"""A run that stops between two log lines logs the iterations since the last line before it ends."""

import json
from pathlib import Path
from types import SimpleNamespace

from megatron.training import log
from megatron.training.loop import train
from tests.checkpoints.runs import Start, make
from tests.support import on_ranks

FLAGS = (
    "--batch-size 1 --gas 2 --train-iters 6 --log-interval 5 --exit-interval 3 --split 8,2 --eval-interval 3 "
    "--eval-iters 1 --skip-iterations 6 --precision fp32"
)


def _stops(folder: str, data: str, vocab_file: str) -> int:
    """Train until the next stop; the clock of the log shows the number of iterations."""
    with make(Start("gpt2", Path(folder), FLAGS), data, vocab_file) as run:
        log.time = SimpleNamespace(perf_counter=lambda: float(run.state.iteration))  # type: ignore[assignment]
        train(run)
        return run.state.iteration


def test_iterations_before_a_stop_have_a_line(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    """An iteration has two samples of 24 tokens. A stop follows an evaluation; the last iteration is skipped."""
    ends = [on_ranks(1, _stops, str(tmp_path), tiny_data, vocab_file)[0] for _ in range(2)]
    assert ends == [3, 6]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == "train"]
    assert [row["iteration"] for row in rows] == [3, 5, 6]
    assert [row["tokens_per_second"] for row in rows] == [48, 48, 0]
    assert all(row["lm_loss"] > 0 for row in rows[:-1])
    assert not {"lm_loss", "grad_norm"} & rows[-1].keys()

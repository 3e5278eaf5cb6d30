"""A run that stops between two log lines logs the iterations since the last line before it ends."""

import json
from pathlib import Path

from megatron.training.loop import train
from tests.checkpoints.runs import Start, make
from tests.support import on_ranks

FLAGS = "--batch-size 1 --gas 2 --train-iters 7 --log-interval 5 --exit-interval 3 --eval-iters 0 --precision fp32"


def _stops(folder: str, data: str, vocab_file: str) -> int:
    with make(Start("gpt2", Path(folder), FLAGS), data, vocab_file) as run:
        train(run)
        return run.state.iteration


def test_iterations_before_a_stop_have_a_line(tmp_path: Path, tiny_data: str, vocab_file: str) -> None:
    ends = [on_ranks(1, _stops, str(tmp_path), tiny_data, vocab_file)[0] for _ in range(3)]
    assert ends == [3, 6, 7]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["split"] == "train"] == [3, 5, 6, 7]
    assert all(row["lm_loss"] > 0 for row in rows)

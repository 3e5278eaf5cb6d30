"""A finished run that is started again evaluates only what metrics.jsonl lacks, and names the rest."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import TrainState
from megatron.config.command_line import parse
from megatron.features import eval_tasks
from megatron.features.eval_tasks import TaskEvaluations
from megatron.features.samples import Samples
from megatron.features.task_sets import TaskSet
from megatron.tasks.gpt2 import GPT2
from megatron.training import evaluation
from megatron.training.metrics import MetricsWriter


def test_only_missing_results_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of `iteration` 6 have one of two data sets, tasks and prompts; the prompt b has a row of iteration 4."""
    rows: list[dict[str, Any]] = [
        {"split": "samples", "iteration": 4, "samples": [{"prompt": "b", "text": "b c"}]},
        {"split": "samples", "iteration": 6, "samples": [{"prompt": "a", "text": "a b"}]},
        {"split": "eval/quiz", "iteration": 6, "accuracy": 0.5},
        {"split": "valid", "iteration": 6, "lm_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--batch-size", "2"]
    config = parse([*flags, "--sample-prompt", "a", "b"], GPT2.defaults, 1)
    metrics = MetricsWriter(str(tmp_path), 6, True)
    run: Any = SimpleNamespace(config=config, metrics=metrics, state=TrainState(6), run_dir=tmp_path)
    evaluated: list[str] = []
    monkeypatch.setattr(evaluation, "evaluate", lambda run, part: evaluated.append(part))
    monkeypatch.setattr(eval_tasks, "evaluate_on_tasks", lambda run, sets: evaluated.extend(each.name for each in sets))
    monkeypatch.setattr(Samples, "_write", lambda self: evaluated.extend(self._prompts))
    tasks = TaskEvaluations()
    tasks.start(run)
    tasks._task_sets = [TaskSet("quiz=a.jsonl", "quiz"), TaskSet("cloze=b.jsonl", "cloze")]
    samples = Samples()
    samples.start(run)
    for part in (evaluation.Evaluations(run), tasks, samples):
        part.end()
    assert evaluated == ["test", "cloze", "b"]
    notes = capsys.readouterr().out
    assert notes.count("note: ") == 3
    for split in ("valid", "eval/quiz", "samples/a"):
        assert f"{tmp_path}/metrics.jsonl has the row {split} of iteration 6 already" in notes

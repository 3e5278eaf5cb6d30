"""Evaluation of a run on its validation and test data."""

import math
from collections import defaultdict

from tds import trace

from ..ranks.objects import from_rank_0
from ..ranks.rank_0 import print_rank_0
from .data_ranks import read
from .engine import Step
from .health import SampleRange
from .hooks import Hook, due
from .log import TrainingLog
from .run_state import Run


def evaluate(run: Run, part: str) -> float | None:
    """Return the mean loss per target over the first --eval-iters global batches of a data set; None without data.

    part: `train`, `valid` or `test`. The function also prints and logs the loss. If the model reports text tokens
    separately, it also prints and logs the loss and the accuracy on text tokens.
    """
    dataset = run.datasets[("train", "valid", "test").index(part)]
    iterations = run.config.train.eval_iters
    if dataset is None or not iterations:
        return None
    batches = read(dataset, run.config, 0)
    sums: defaultdict[str, float] = defaultdict(float)
    for _ in range(iterations):
        for name, value in run.engine.eval_batch(batches).items():
            sums[name] += value
    loss = sums["loss"] / sums["targets"]
    row = {"split": part, "iteration": run.state.iteration, "lm_loss": loss, "ppl": math.exp(min(loss, 700))}
    line = f"iteration {run.state.iteration:7d} | {part} loss {loss:.4f} | ppl {row['ppl']:.2f}"
    if tokens := sums["text_tokens"]:
        row |= {"text_loss": sums["text_loss"] / tokens, "text_accuracy": sums["text_right"] / tokens}
        line += f" | text loss {row['text_loss']:.4f} | text accuracy {row['text_accuracy']:.1%}"
    print_rank_0(line)
    run.metrics.write(row)
    return loss


def evaluate_once(run: Run, part: str) -> None:
    """Evaluate `part`, unless metrics.jsonl already holds the result because a finished run was started again.

    All ranks must call this.
    """
    if from_rank_0(run.metrics.holds(part, run.state.iteration)):
        print_rank_0(
            f"note: {run.run_dir}/metrics.jsonl already holds the {part} loss of iteration {run.state.iteration}, so "
            f"there is no evaluation"
        )
    else:
        evaluate(run, part)


class Evaluations(Hook):
    """Hook that evaluates on validation data every --eval-interval iterations, except after the last iteration."""

    def __init__(self, run: Run, log: TrainingLog) -> None:
        self._run, self._log = run, log

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        t = self._run.config.train
        if due(samples.iteration, t.eval_interval) and samples.iteration < t.train_iters:
            self._log.check()
            with trace.span("evaluation"):
                evaluate(self._run, "valid")
            self._log.restart()

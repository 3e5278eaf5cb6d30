"""Evaluation of a run on its validation and test data."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tds import trace

from ..ranks.objects import broadcast_from_rank_0
from ..ranks.rank_0 import print_rank_0
from .data_ranks import read_batches
from .feature import Periodic
from .run_state import Run


def evaluate(run: Run, part: str) -> float | None:
    """Return the mean loss per target over the first --eval-iters global batches of a data set; None without data.

    Call it while `train` runs, as from a feature.
    part: `train`, `valid` or `test`. The function prints and logs the loss, and the loss and accuracy on text tokens if
    the model reports them. For a blend and for named data sets, it also logs the loss of each, as the split
    `valid/<name>`. The mean loss of named data sets is that of all their targets.
    """
    dataset = run.datasets[("train", "valid", "test").index(part)]
    if dataset is None or not run.config.train.eval_iters:
        return None
    iteration = run.state.iteration
    total: defaultdict[str, float] = defaultdict(float)
    rows = []  # those of named data sets and of features, before the row of all together
    named_sets = dataset.items() if isinstance(dataset, Mapping) else [("", dataset)]  # "": a set without a name
    for name, named_set in named_sets:
        sums = _evaluate_dataset(run, named_set)
        for key, value in sums.items():
            total[key] += value
        if name:
            rows.append(_evaluation_row(sums, f"{part}/{name}", iteration))
    for feature in run.features:
        rows += feature.evaluated(part, iteration, total)
    total_row = _evaluation_row(total, part, iteration)
    for row in [*rows, total_row]:
        run.features.finish(row)
        if row.get("lm_loss") is not None:  # a feature may add rows without a loss, which are only logged
            print_rank_0(_format_line(row))
        run.metrics.write(row)
    return float(total_row["lm_loss"])


def _evaluate_dataset(run: Run, dataset: Any) -> defaultdict[str, float]:
    """Evaluate a data set; return its summed loss, its number of targets, and the sums of additional values."""
    batches = read_batches(dataset, run.config, consumed_samples=0)  # each evaluation starts at the first sample
    sums: defaultdict[str, float] = defaultdict(float)
    for _ in range(run.config.train.eval_iters):
        for name, value in run.engine.eval_batch(batches).items():
            sums[name] += value
    return sums


def _evaluation_row(sums: Mapping[str, float], split: str, iteration: int) -> dict[str, Any]:
    """Return the row of metrics.jsonl for the sums of an evaluation."""
    loss = sums["loss"] / sums["targets"] if sums["targets"] else math.nan
    row = {"split": split, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss)}
    if tokens := sums.get("text_tokens"):
        row |= {"text_loss": sums["text_loss"] / tokens, "text_accuracy": sums["text_right"] / tokens}
    return row


def perplexity(loss: float) -> float:
    """Return exp(loss), but at most exp(700), the largest power of e below the largest float."""
    return math.exp(min(loss, 700.0))


def _format_line(row: Mapping[str, Any]) -> str:
    ppl = row.get("ppl", perplexity(row["lm_loss"]))
    line = f"iteration {row['iteration']:7d} | {row['split']} loss {row['lm_loss']:.4f} | ppl {ppl:.2f}"
    if "bits_per_byte" in row:
        line += f" | {row['bits_per_byte']:.3f} bits/byte"
    if "text_loss" in row:
        line += f" | text loss {row['text_loss']:.4f} | text accuracy {row['text_accuracy']:.1%}"
    return line


class Evaluations(Periodic):
    """Part of a run that evaluates every --eval-interval iterations, and after the last one, also on test data."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._interval = run.config.train.eval_interval

    def _write(self) -> None:
        with trace.span("evaluation"):
            evaluate(self._run, "valid")

    def end(self) -> None:
        """Evaluate after the last iteration on the data whose results metrics.jsonl does not hold yet."""
        run = self._run
        for part in ("valid", "test"):
            # Only rank 0 reads metrics.jsonl.
            if not broadcast_from_rank_0(run.metrics.has_row(part, run.state.iteration)):
                evaluate(run, part)

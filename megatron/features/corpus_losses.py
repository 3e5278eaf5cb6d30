"""The loss of each corpus of a blend, from the sums that `model/loss.py` reports beside the loss.

The weighted mean of the losses of all corpora, with their shares of the targets as weights, is the loss of the blend.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.corpus_paths import corpus_names
from ..data.splits import PARTS
from ..engines.engine import StepResult
from ..model.extra_losses import CORPUS_LOSS, CORPUS_TARGETS
from ..training.evaluation import perplexity
from ..training.feature import Feature
from ..training.health import SampleRange
from ..training.run_state import Run


def configured_corpora(config: Config) -> list[str]:
    """Return the names of the corpora; [] if the settings name no corpora."""
    data = config.data
    return corpus_names(data.paths) if data.names_corpora else []


def corpus_rows(
    sums: Mapping[str, float], names: Iterable[str], split: str, iteration: int, divisor: float
) -> list[dict[str, Any]]:
    """Return a row for metrics.jsonl for each corpus that has targets; its split is, e.g., `train/wiki`.

    sums: values that the loss reports beside the loss, summed over micro-batches. divisor: number by which they are to
    be divided so that the targets of all corpora sum to 1.
    """
    rows = []
    for i, name in enumerate(names):
        targets = sums.get(f"{CORPUS_TARGETS}/{i}", 0.0)
        if targets:  # 0 if no sample was of this corpus
            loss = sums[f"{CORPUS_LOSS}/{i}"] / targets
            row = {"split": f"{split}/{name}", "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss)}
            row["target_share"] = targets / divisor
            rows.append(row)
    return rows


class CorpusLosses(Feature):
    """Feature that writes a row for each corpus of a blend. The host does not wait for the device until `rows`."""

    def start(self, run: Run) -> None:
        self._names = configured_corpora(run.config)
        self._has_named_sets = {part: isinstance(each, Mapping) for part, each in zip(PARTS, run.datasets, strict=True)}
        self._sums: dict[str, Tensor] = {}
        self._num_steps: Tensor | float = 0.0

    def after_step(self, step: StepResult | None, samples: SampleRange) -> None:
        """Add the sums of a step, unless its loss is NaN or Inf."""
        if step is None:
            return
        is_finite = torch.isfinite(step.loss)  # a tensor, so that the host does not wait
        names = [name for name in step.aux if name.startswith((CORPUS_LOSS, CORPUS_TARGETS))]
        for name in names:
            value = torch.where(is_finite, step.aux[name], 0.0)
            self._sums[name] = self._sums.get(name, 0.0) + value
        if names:
            self._num_steps = self._num_steps + is_finite.double()

    def rows(self, iteration: int) -> list[dict[str, Any]]:
        if not self._sums:
            return []
        # One transfer from the device for all numbers, as each transfer waits for the device.
        num_steps, *sums = torch.stack([torch.as_tensor(self._num_steps), *self._sums.values()]).tolist()
        sum_of = dict(zip(self._sums, sums, strict=True))
        # The engine has divided the values of each step by its targets, so the targets of all corpora sum to num_steps.
        rows = corpus_rows(sum_of, self._names, "train", iteration, num_steps)
        self._sums = {}
        self._num_steps = 0.0
        return rows

    def evaluated(self, split: str, iteration: int, sums: Mapping[str, float]) -> list[dict[str, Any]]:
        if self._has_named_sets[split]:  # `evaluate` has a row for each of them
            return []
        rows = corpus_rows(sums, self._names, split, iteration, sums["targets"])
        return rows if len(rows) > 1 else []  # the loss of a single corpus is that of the whole set

"""The spike guard and the moving average of the weights, for training in plain torch."""

import json
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.checkpoints.runs import whole_tensors

from .reference import Weights

SIGMA, WINDOW, STEPS = 0.25, 4, 20  # steps 12, 14 and 19 are skipped
GUARD = ("--skip-step-sigma", str(SIGMA), "--skip-step-window", str(WINDOW))
DECAY = 0.8


class Guard:
    """Decisions of --skip-step-sigma by Python's statistics; `skipped` lists the numbers of skipped steps, from 1."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._step, self.skipped = 0, list[int]()

    def __call__(self, *step: float) -> bool:
        self._step += 1
        if len(self._recent) >= WINDOW // 2:
            for value, before in zip(step, zip(*self._recent, strict=True), strict=True):
                if value > statistics.mean(before) + SIGMA * statistics.stdev(before):
                    self.skipped.append(self._step)
                    return True
        self._recent.append((step[0], step[1]))
        return False


class Average:
    """Average of --ema-decay by torch's AveragedModel."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._model: AveragedModel | None = None

    def __call__(self, weights: Weights) -> None:
        model = torch.nn.ParameterList(p.detach().clone() for p in weights.values())
        if self._model is None:
            self._names = list(weights)
            self._model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self._model.update_parameters(model)

    def distance(self, found: Weights) -> float:
        """Return the norm of the difference from the averages `found`, relative to that of all averages."""
        assert self._model is not None
        expected = [p.detach().double() for p in self._model.module.parameters()]
        differences = [found[name][: len(p)] - p for name, p in zip(self._names, expected, strict=True)]
        return float(_norm(differences) / _norm(expected))


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors]).norm()


def averages(run_dir: Path) -> Weights:
    """Return the averages of the last checkpoint of a run, by the name of the weight."""
    last = max((run_dir / "checkpoints").glob("iter_*"))
    tensors = whole_tensors(last).items()
    return {key.removeprefix("ema."): torch.from_numpy(value) for key, value in tensors if key.startswith("ema.")}


def skipped(run_dir: Path) -> list[int]:
    """Return the numbers of the steps that --skip-step-sigma skipped in a run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [spike["iteration"] for row in rows for spike in row.get("skipped_spikes", [])]

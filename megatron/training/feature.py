"""The seam between a run and its optional parts: the class `Feature`.

The run calls its features at a few points, and names none of them: `megatron/config/feature_table.py` says which
setting asks for which feature. A feature that no setting asks for is not imported. This module imports no torch,
because the files of features with settings are imported when flags are parsed.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import Config
    from ..config.ds_config import Resolved
    from ..engines.engine import Batches, StepResult
    from ..tokenizer import Tokenizer
    from .health import SampleRange
    from .run_state import Run
    from .task import Task


class Plan(NamedTuple):
    """What is known of a run before its model is built."""

    task: "Task"
    config: "Config"
    resolved: "Resolved"
    device: "torch.device"
    tokenizer: "Tokenizer | None"


class Interval(NamedTuple):
    """The iterations since the last log line: how many, seconds per iteration, and name -> seconds of their parts."""

    iterations: int
    seconds: float
    timed: Mapping[str, float]


class Feature:
    """Base class of optional parts of a run. By default, each method does nothing.

    A feature exists on all ranks or on none, and all ranks call its methods in the same order. So a method may
    communicate with other ranks, unless its description says otherwise.
    name: key of the feature's state in checkpoints; for features of the table, their name there.
    after_log: True if `after_step` must follow the log, because its time must not count as time of the iteration.
    """

    name = ""
    after_log = False

    def prepare(self, plan: Plan) -> None:
        """Check the settings before the model is built. Raises ValueError if the run cannot use the feature."""

    def model(self, model: "nn.Module", plan: Plan) -> None:
        """Change the model before the engine gets it."""

    def engine(self, engine: Any, plan: Plan) -> None:
        """Change the DeepSpeed engine that `tds.initialize` has returned."""

    def start(self, run: "Run") -> None:
        """Begin the run. The checkpoint is loaded, and no iteration has run."""

    def batches(self, batches: "Batches | None") -> "Batches | None":
        """Return the iterator over micro-batches of training; None on a rank that reads no data."""
        return batches

    def before_step(self, iteration: int) -> None:
        """Act before iteration `iteration`, counted from 1."""

    def after_step(self, step: "StepResult | None", samples: "SampleRange") -> None:
        """Act after an iteration.

        step: None if a --skip-* flag skipped the iteration.
        samples: the iteration's number and its range of samples.
        """

    def before_save(self, iteration: int) -> None:
        """Act before the state after `iteration` is saved. Raises RunError, on all ranks, to end the run instead."""

    def instead(self, task: "Task", config: "Config") -> None:
        """Act in place of the run, before the ranks meet; only called for a row of the table with `instead`."""

    def row(self, interval: Interval) -> dict[str, Any]:
        """Return entries for the row of metrics.jsonl that is due."""
        return {}

    def rows(self, iteration: int) -> list[dict[str, Any]]:
        """Return further rows of metrics.jsonl, after the row of training; each needs `split` and `iteration`."""
        return []

    def extend(self, row: dict[str, Any]) -> None:
        """Add entries to a finished row of training or of an evaluation, before it is printed and written."""

    def evaluated(self, split: str, iteration: int, sums: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return further rows of metrics.jsonl, before the row of an evaluation.

        split: `valid` or `test`. sums: summed `loss`, number of `targets`, and sums of what the model reports besides,
        over all ranks. A row needs `split` and `iteration`; one with `lm_loss` is printed, too.
        """
        return []

    def end(self) -> None:
        """Act after the last iteration of --train-iters; not called if the run stops earlier."""

    def close(self, error: BaseException | None) -> None:
        """Clean up when the iterations end. error: what ended them; then other ranks may not call this method."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must store, as JSON; {} for nothing. It is equal on all ranks.

        Called in every iteration, as a save after skipped steps stores the state after the last step that was not.
        """
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was saved. Called before `start`, if there is a state."""


class Periodic(Feature):
    """Part of a run that computes and writes results every `_interval` iterations, but not after the last one.

    A subclass sets the attributes when the run begins. After the last iteration, the run calls `end` instead.
    """

    after_log = True
    _run: "Run"
    _interval: int

    def _write(self) -> None:
        """Compute the results after an iteration, and write them."""

    def after_step(self, step: "StepResult | None", samples: "SampleRange") -> None:
        run = self._run
        if due(samples.iteration, self._interval) and samples.iteration < run.config.train.train_iters:
            run.log.check()  # read the pending losses first: if the run must end, it ends here
            self._write()
            run.log.restart_timer()  # without the time of the results


def due(iteration: int, interval: int) -> bool:
    """Return True if an action that recurs every `interval` iterations is due; False for interval 0."""
    return interval > 0 and iteration % interval == 0

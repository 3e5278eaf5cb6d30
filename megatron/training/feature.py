"""The seam between a run and its optional parts: the class `Feature`, and `Features`, those of one run in order.

The run calls its features at a few points, and names none of them. `feature_table.py` says which setting asks for which
feature, and where the feature lives; a feature that no setting asks for is not imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import Config
from ..ranks.agreement import all_ranks
from ..ranks.rank_0 import print_rank_0
from .feature_table import TABLE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config.ds_config import Resolved
    from ..tokenizer import Tokenizer
    from .engine import Batches, Step
    from .health import SampleRange
    from .run_state import Run
    from .task import Task


class Plan(NamedTuple):
    """What is known of a run before its model is built."""

    task: "Task"
    config: Config
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
    name: key of the feature's state in checkpoints.
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

    def after_step(self, step: "Step | None", samples: "SampleRange") -> None:
        """Act after an iteration.

        step: None if a --skip-* flag skipped the iteration.
        samples: the iteration's number and its range of samples.
        """

    def row(self, interval: Interval) -> dict[str, Any]:
        """Return entries for the row of metrics.jsonl that is due."""
        return {}

    def rows(self, iteration: int) -> list[dict[str, Any]]:
        """Return further rows of metrics.jsonl, after the row of training that is due."""
        return []

    def evaluated(self, split: str, iteration: int, sums: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return further rows of metrics.jsonl, before the row of an evaluation.

        split: `valid` or `test`. sums: summed loss, number of `targets`, and sums of what the model reports besides.
        """
        return []

    def end(self) -> None:
        """Act after the last iteration of --train-iters; not called if the run stops earlier."""

    def close(self, error: BaseException | None) -> None:
        """Clean up when the iterations end. error: what ended them; then other ranks may not call this method."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must store, as JSON; {} for nothing. It is equal on all ranks."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was saved."""


def due(iteration: int, interval: int) -> bool:
    """Return True if an action that recurs every `interval` iterations is due; False for interval 0."""
    return interval > 0 and iteration % interval == 0


class Features:
    """The features of a run, in the order in which they are called: those of the table, then the user's own.

    own: features that the caller of `run` has made. Raises ValueError if two features have one name.
    """

    def __init__(self, config: Config, own: Sequence[Feature] = ()) -> None:
        self.all: list[Feature] = []
        for name, row in TABLE.items():
            if row.wanted(config):
                feature = _load(row.home)
                feature.name = name
                self.all.append(feature)
        taken = set(TABLE)
        for each in own:
            each.name = each.name or type(each).__name__
            if each.name in taken:
                raise ValueError(f"two features have the name {each.name}; give {type(each).__name__} another `name`")
            taken.add(each.name)
            self.all.append(each)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self.all)

    def prepare(self, plan: Plan) -> None:
        """Call `prepare` of each feature. If one raises ValueError on a rank, every rank raises RunError."""
        for each in self.all:
            with all_ranks():
                each.prepare(plan)

    @contextmanager
    def running(self, run: "Run") -> Iterator[None]:
        """Context of the iterations of `run`: call `start` of each feature, and `close` at the end, in reverse."""
        with ExitStack() as stack:
            for each in self.all:
                each.start(run)
                stack.push(_Closing(each).leave)
            yield

    def row(self, interval: Interval) -> dict[str, Any]:
        """Return the entries of all features; dicts of one name are merged, such as the numbers of layers."""
        found: dict[str, Any] = {}
        for each in self.all:
            _merge(found, each.row(interval))
        return found

    def rows(self, iteration: int) -> list[dict[str, Any]]:
        """Return the further rows of all features."""
        return [row for each in self.all for row in each.rows(iteration)]

    def evaluated(self, split: str, iteration: int, sums: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return the further rows of all features about an evaluation."""
        return [row for each in self.all for row in each.evaluated(split, iteration, sums)]

    def state(self) -> dict[str, dict[str, Any]]:
        """Return name -> state of each feature that has one."""
        states = {each.name: each.state() for each in self.all}
        return {name: state for name, state in states.items() if state}

    def load(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the states of a checkpoint. Raises ValueError for a state of a feature that is not known."""
        members = {each.name: each for each in self.all}
        for name, state in states.items():
            if name in members:
                members[name].load(state)
            elif name in TABLE:
                print_rank_0(f"note: the checkpoint has a state of {name}, which this run does not use")
            else:
                raise ValueError(
                    f"the checkpoint has a state of the feature {name}, which this run does not have: pass the feature "
                    "to run(task, features=[...]), as the run that saved the checkpoint did"
                )


class _Closing:
    """The exit of a feature, as `ExitStack.push` calls it."""

    def __init__(self, feature: Feature) -> None:
        self._feature = feature

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._feature.close(error)


def _merge(into: dict[str, Any], entries: Mapping[str, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, Mapping) and name in into:
            _merge(into[name], value)
        else:
            into[name] = value


def _load(home: str) -> Feature:
    """Return a new feature of the class at `home`, such as `megatron.features.layer_log:LayerLog`."""
    module, name = home.split(":")
    feature: Feature = getattr(import_module(module), name)()
    return feature

"""The features of a run: those that its settings ask for, and those of the caller of `run`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..config.feature_table import TABLE
from ..ranks.agreement import all_ranks
from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
from .feature import Feature, Interval, Plan

if TYPE_CHECKING:
    from .run_state import Run

Entries = dict[str, Any]  # entries of a row of metrics.jsonl, or the state of a feature


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
                stack.push(partial(_close, each))
            yield

    def before_save(self, iteration: int) -> None:
        """Call `before_save` of each feature."""
        for each in self.all:
            each.before_save(iteration)

    def row(self, interval: Interval) -> Entries:
        """Return the entries of all features; dicts of one name are merged, such as the numbers of layers."""
        found: Entries = {}
        for each in self.all:
            _merge(found, each.row(interval))
        return found

    def rows(self, iteration: int) -> list[Entries]:
        """Return the further rows of all features."""
        return [row for each in self.all for row in each.rows(iteration)]

    def extend(self, row: Entries) -> None:
        """Call `extend` of each feature."""
        for each in self.all:
            each.extend(row)

    def evaluated(self, split: str, iteration: int, sums: Mapping[str, float]) -> list[Entries]:
        """Return the further rows of all features about an evaluation."""
        return [row for each in self.all for row in each.evaluated(split, iteration, sums)]

    def state(self) -> dict[str, Entries]:
        """Return name -> state of each feature that has one. Raises RunError for a state that JSON cannot hold."""
        states = {}
        for each in self.all:
            state = each.state()
            if state:
                _check_state(each.name, state)
                states[each.name] = state
        return states

    def load(self, states: Mapping[str, Entries]) -> None:
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


def _close(feature: Feature, *raised: Any) -> None:
    feature.close(raised[1])  # of the type of the error, the error and its traceback


def _check_state(name: str, state: Any) -> None:
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"the feature {name} has a state that JSON cannot hold: {error}; return numbers, texts, lists and dicts, "
            "and None in place of infinity and NaN"
        ) from None


def _merge(into: Entries, entries: Mapping[str, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, Mapping) and name in into:
            _merge(into[name], value)
        else:
            into[name] = value


def substitute(config: Config) -> Feature | None:
    """Return the feature whose method `instead` takes the place of the run, None if the settings ask for none."""
    for row in TABLE.values():
        if row.instead and row.wanted(config):
            return _load(row.home)
    return None


def _load(home: str) -> Feature:
    """Return a new feature of the class at `home`, such as `megatron.features.layer_log:LayerLog`."""
    module, name = home.split(":")
    feature: Feature = getattr(import_module(module), name)()
    return feature

"""The features of a run: those that its settings ask for, and those of the caller of `run`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..config.feature_table import TABLE
from ..ranks.errors import RunError
from ..ranks.rank_0 import is_rank_0, print_rank_0
from ..rows import parse_row
from .feature import Feature, Interval

if TYPE_CHECKING:
    from .run_state import Run

Entries = dict[str, Any]  # entries of a row of metrics.jsonl, or the state of a feature


class Features(list[Feature]):
    """The features of a run, in the order in which they are called: those of the table, then the user's own.

    own: features that the caller of `run` has made. Raises ValueError if two features have one name.
    """

    def __init__(self, config: Config, own: Sequence[Feature] = ()) -> None:
        for name, row in TABLE.items():
            if row.wanted(config):
                feature = _load_feature(row.class_path)
                feature.name = name
                self.append(feature)
        names = set(TABLE)  # of unused features, too, whose states a checkpoint may have
        if not isinstance(own, Sequence) or not all(isinstance(each, Feature) for each in own):
            raise ValueError(f"features must be a list of objects of subclasses of Feature, not {own!r}")
        self._has_own = bool(own)
        for feature in own:
            kind = type(feature).__name__
            feature.name = feature.name or kind
            if feature.name in names:
                raise ValueError(f"two features have the name {feature.name}; give {kind} another `name`")
            names.add(feature.name)
            self.append(feature)

    @contextmanager
    def running(self, run: "Run") -> Iterator[None]:
        """Context of the iterations of `run`: call `start` of each feature, and `close` at the end, in reverse."""
        with ExitStack() as stack:
            for each in self:
                each.start(run)
                stack.push(partial(_close_feature, each))  # push(), as its functions get the error
            yield

    def row(self, interval: Interval) -> Entries:
        """Return the entries of all features; dicts of one name are merged, such as the numbers of layers.

        Raises ValueError for a row that a run cannot write, perhaps on one rank only.
        """
        entries: Entries = {}
        for each in self:
            row = each.row(interval)
            _check_entries(each.name, "row", row)
            _merge_entries(entries, row)
        return entries

    def finish(self, row: Entries) -> None:
        """Let all features extend a row. Raises ValueError on rank 0 for a row of a user's that a run cannot write."""
        self._check_row(row)
        for each in self:
            each.extend(row)
        self._check_row(row)

    def _check_row(self, row: Entries) -> None:
        if not self._has_own or not is_rank_0():  # rank 0 alone writes rows
            return
        try:
            if not isinstance(row.get("split"), str):
                raise TypeError("it has no split")
            parse_row(json.dumps(row))
        except (TypeError, ValueError) as error:
            raise ValueError(f"a feature has made or extended a row that a run cannot write: {error}") from None

    def state(self) -> dict[str, Entries]:
        """Return name -> state of each feature that has one. Raises RunError for a state that JSON cannot hold."""
        states = {}
        for each in self:
            state = each.state()
            if state:
                _check_entries(each.name, "state", state)
                states[each.name] = deepcopy(state)  # the feature may change its lists and dicts later
        return states

    def load(self, states: Mapping[str, Entries]) -> None:
        """Restore the states of a checkpoint. Raises ValueError for a state of a feature that is not known."""
        by_name = {each.name: each for each in self}
        for name, state in states.items():
            if name in by_name:
                by_name[name].load(state)
            elif name in TABLE:
                print_rank_0(f"note: the checkpoint has a state of {name}, which this run does not use")
            else:
                raise ValueError(
                    f"the checkpoint has a state of the feature {name}, which this run does not have: pass the feature "
                    "to run(task, features=[...]), as the run that saved the checkpoint did"
                )


def _close_feature(feature: Feature, kind: object, error: Any, *_: object) -> None:
    """Close `feature`. The further arguments are those of `__exit__`: class of the error, error, traceback."""
    feature.close(error)


def _check_entries(name: str, kind: str, entries: Any) -> None:
    is_row = kind == "row"
    try:
        if not isinstance(entries, dict):
            raise TypeError(f"it is {entries!r}, not a dict")
        json.dumps(entries, allow_nan=is_row)
        if is_row:  # its entries become part of a line of metrics.jsonl
            parse_row(json.dumps({"iteration": 0, "split": "row", **entries}))
    except (TypeError, ValueError) as error:
        # A row may be bad on one rank only, but states are equal on all ranks.
        error_class = ValueError if is_row else RunError
        raise error_class(
            f"the feature {name} has a {kind} that a run cannot write: {error}; return numbers, texts, lists and "
            "dicts, and None in place of infinity and NaN"
        ) from None


def _merge_entries(into: Entries, entries: Mapping[str, Any]) -> None:
    """Add `entries` to `into`, and the entries of a dict that both have to that dict."""
    for name, value in entries.items():
        if isinstance(value, Mapping) and name in into:  # e.g. the layers of two features
            _merge_entries(into[name], value)
        else:
            into[name] = value


def find_substitute(config: Config) -> Feature | None:
    """Return the feature whose method `instead` takes the place of the run, None if the settings ask for none."""
    for row in TABLE.values():
        if row.instead and row.wanted(config):
            return _load_feature(row.class_path)
    return None


def _load_feature(class_path: str) -> Feature:
    """Return a new feature of the class at `class_path`, such as `megatron.features.layer_log:LayerLog`."""
    feature: Feature = resolve_name(class_path)()
    return feature

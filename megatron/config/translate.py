"""A command line with flags of other projects brought to settings of ours, by the tables of foreign_flags.py."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from .fields import flag
from .foreign_flags import FLAGS, VALUES
from .outcomes import ByValue, Depends, Means, NoEffect, Outcome, Refused
from .sections import Config

Change = Callable[[Config, Mapping[str, Any]], Config]


class _Keep(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        kept = getattr(namespace, self.dest, {})
        setattr(namespace, self.dest, {**kept, option_string: True if values == [] else values})


def add_to(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take the flags of other projects, unseen in its help, into a dict `foreign`: value by flag."""
    for name, row in FLAGS.items():
        form: dict[str, Any] = {"type": row.takes}
        if row.takes is None:
            form = {"nargs": 0}
        elif row.takes is list:
            form = {"nargs": "*"}
        parser.add_argument(name, action=_Keep, dest="foreign", help=argparse.SUPPRESS, **form)


def flag_of(key: str) -> str | None:
    """The flag of another project that a key of a JSON file is the name of."""
    return next((name for name in FLAGS if key == name[2:].replace("-", "_")), None)


def settings_for(key: str) -> list[str]:
    """The settings of ours that a setting of another project is taken for."""
    name = flag_of(key)
    outcome = FLAGS[name].outcome if name else None
    return list(outcome.settings) if isinstance(outcome, Means) else []


def written(name: str, value: Any) -> str:
    """As it stands on a command line."""
    if isinstance(value, bool):
        return name if value else f"--no-{name[2:]}"
    return " ".join([name, *map(str, value if isinstance(value, (list, tuple)) else [value])])


class Translation:
    """What is set by names of other projects, what to say about it (`notes`), and what is wrong with it (`problems`).

    own: settings that are given by our names at the same place. `values` are they and those that were found.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self.values = dict(own)
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._said_by: dict[str, str] = {}
        self._waiting: dict[str, Any] = {}
        for setting, values in VALUES.items():
            if own.get(setting) in values:
                there, ours = own[setting], values[own[setting]]
                self.values[setting] = ours
                self.notes.append(f"{written(flag(setting), there)} taken for {written(flag(setting), ours)}")

    def add(self, name: str, value: Any) -> None:
        """A flag of FLAGS. What depends on other settings waits for `settle`."""
        outcome = FLAGS[name].outcome
        if isinstance(outcome, Depends):
            self._waiting[name] = value
        else:
            self._take(name, value, outcome)

    def waiting(self) -> list[str]:
        """Foreign settings that nothing has taken yet."""
        return list(self._waiting)

    def settle(self, config: Config, ranks: int, change: Change) -> Config:
        """`config` with what depends on it, in the order of the table. change: gives a Config with some settings changed."""
        for name in [each for each in FLAGS if each in self._waiting]:
            outcome = FLAGS[name].outcome
            assert isinstance(outcome, Depends)
            new = self._take(name, self._waiting[name], outcome.on(config, self._waiting[name], ranks))
            config = change(config, new) if new else config
        return config

    def _take(self, name: str, value: Any, outcome: Outcome) -> dict[str, Any]:
        said = written(name, value)
        if isinstance(outcome, ByValue):
            outcome = outcome.values.get(str(value)) or Refused(f"it may be {', '.join(outcome.values)}")
        if isinstance(outcome, Refused):
            self.problems.append(f"{said} is not taken: {outcome.advice}")
        elif isinstance(outcome, NoEffect):
            self.notes.append(f"{said} has no effect: {outcome.why}")
        elif isinstance(outcome, Means):
            new = {setting: v(value) if callable(v) else v for setting, v in outcome.settings.items()}
            ours = " ".join(written(flag(setting), v) for setting, v in new.items())
            for setting, v in new.items():
                if self.values.get(setting, v) != v:
                    other = self._said_by.get(setting) or written(flag(setting), self.values[setting])
                    self.problems.append(f"{said} means {ours}, against {other}; leave one of them out")
                    return {}
            self.values |= new
            self._said_by |= dict.fromkeys(new, said)
            self.notes.append(f"{said} taken for {ours}" + (f" ({outcome.but})" if outcome.but else ""))
            return new
        return {}

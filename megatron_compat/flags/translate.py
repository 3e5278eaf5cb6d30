"""Translation of foreign flags (of other frameworks) to this project's settings, by the tables of flags.py."""

import argparse
import difflib
from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any

from megatron.config.fields import flag, written
from megatron.config.sections import Config, settings
from megatron.config.source import Change, Source
from megatron.json_text import brief

from .core import BALANCING, EXPERT_BIAS, with_expert_bias
from .outcomes import ByValue, Depends, Means, NoEffect, Outcome, Refused
from .table import FLAGS, IMPLIED, VALUES

_USUAL = {f.name: f.default for _, _, f in settings()}

SAID = {"true": True, "false": False}  # some launchers write these words after a flag that takes no value


class _Keep(argparse.Action):
    """Action that stores the value of a foreign flag in the dict `foreign`, keyed by its name in flags.py."""

    def __init__(self, *args: Any, theirs: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.theirs = theirs

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        takes = FLAGS[self.theirs].takes
        if takes in (None, object):
            values = True if values is None else SAID.get(values.lower(), values)
        if takes is None and not isinstance(values, bool):
            parser.error(f"{option_string} takes no value, but was given {values}")
        kept = dict(getattr(namespace, self.dest, {}))
        kept[self.theirs] = values
        setattr(namespace, self.dest, kept)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Let `parser` accept foreign flags, which its help does not show, and store their values in the dict `foreign`.

    Each flag is also accepted with `_` in place of `-`.
    """
    for name, row in FLAGS.items():
        form: dict[str, Any] = {"type": row.takes}
        if row.takes in (None, object):
            form = {"nargs": "?"}
        elif row.takes is list:
            form = {"nargs": "*"}
        form |= {"action": partial(_Keep, theirs=name), "dest": "foreign", "help": argparse.SUPPRESS}
        for spelling in dict.fromkeys((name, _underlined(name))):
            parser.add_argument(spelling, **form)


def _underlined(name: str) -> str:
    return "--" + name[2:].replace("-", "_")


def flag_of(key: str) -> str | None:
    """Return the foreign flag that has the same name as a JSON key, or None."""
    return next((name for name in FLAGS if key == _underlined(name)[2:]), None)


def suggestion(name: str, ours: Iterable[str], strange: bool = True) -> str:
    """Return `; did you mean --x?` for an unknown flag, or an empty string if no known flag is similar.

    Candidates are the flags `ours` and the foreign flags. If a foreign flag is closest, its replacement in this project
    is suggested.
    ours: flags of this project.
    strange: also consider foreign flags whose replacement is not in `ours`.
    """
    dashed = "--" + name.lstrip("-").replace("_", "-")
    ours = list(ours)
    if dashed in ours:
        return f"; did you mean {dashed}?"
    begun = [each for each in ours if each.startswith(f"{dashed}-")]
    if len(begun) == 1:
        return f"; did you mean {begun[0]}?"
    known = [*ours]
    for theirs in FLAGS:
        if theirs not in ours and (strange or _flags_for(theirs) <= set(ours)):
            known.append(theirs)
    close = difflib.get_close_matches(dashed, known, n=1, cutoff=0.7)
    if not close:
        return ""
    found = close[0]
    meant = f"{found}?" if found in ours else _in_place_of(found, ours, dashed)
    return f"; did you mean {meant}"


def _flags_for(theirs: str) -> set[str]:
    """Return the flags of this project that replace a foreign flag; {""} if there are none, so that no flag matches."""
    return {flag(each) for each in settings_for(theirs[2:].replace("-", "_"))} or {""}


def _in_place_of(theirs: str, ours: Iterable[str], given: str) -> str:
    """Return the suggestion for a foreign flag: its replacement, or its name and the reason why it is refused."""
    outcome = FLAGS[theirs].outcome
    if isinstance(outcome, ByValue):
        outcome = _typical(outcome)
    if isinstance(outcome, Refused):
        return f"{theirs}? It is not accepted: {outcome.advice}"
    if not isinstance(outcome, Means) or not outcome.settings:
        return f"{theirs}?"
    flags = [flag(setting) for setting in outcome.settings]
    if not set(flags) <= set(ours):
        return f"{theirs}?"
    elsewhere = f" ({theirs} in other projects)" if theirs != given else ""
    return f"{' and '.join(flags)}{elsewhere}?"


def _typical(outcome: ByValue) -> Outcome:
    """Return the first translation among the outcomes of a flag's values, or a refusal that lists the values."""
    for each in (*outcome.values.values(), outcome.other):
        if isinstance(each, Means):
            return each
    return _refusal(outcome)


def _refusal(outcome: ByValue) -> Means | Refused:
    """Return the outcome of a value that is not in the table."""
    return outcome.other or Refused(f"choose one of {', '.join(outcome.values)}")


def settings_for(key: str) -> list[str]:
    """Return the names of this project's settings to which the foreign key `key` translates."""
    name = flag_of(key)
    outcome = FLAGS[name].outcome if name else None
    return list(outcome.settings) if isinstance(outcome, Means) else []


def _is_switch(name: str) -> bool:
    """Return whether a foreign flag needs no value and only sets settings of this project to True."""
    row = FLAGS[name]
    return row.takes in (None, object) and isinstance(row.outcome, Means) and {*row.outcome.settings.values()} == {True}


class Translation(Source):
    """Translation of one source (file or command line): resulting settings, notes and problems.

    own: settings that the source gives under this project's names. `values` starts with them; the settings to which
    foreign flags translate are added to it.
    """

    def __init__(self, own: Mapping[str, Any], where: str = "") -> None:
        super().__init__(own, where)
        self._said_by: dict[str, str] = {}
        self._waiting: dict[str, Any] = {}
        self._open: list[tuple[str, dict[str, Any], Means]] = []
        for setting, values in VALUES.items():
            word = own.get(setting)
            if isinstance(word, str) and word in values:
                self._translate_word(setting, word, values[word])

    def _translate_word(self, setting: str, word: str, value: str) -> None:
        """Translate another framework's word for the value of a flag that both projects have."""
        said = written(flag(setting), word)
        new = {setting: value}
        self.values |= new
        if word in IMPLIED:
            self._open.append((said, new, IMPLIED[word]))
        else:
            self.notes.append(_taken(said, new, ""))

    def add_all(self, flags: Mapping[str, Any]) -> None:
        """Translate all foreign flags of the source: name -> value."""
        rest = dict(flags)
        joint = with_expert_bias(flags)
        if joint:
            pair = [written(name, rest.pop(name)) for name in (EXPERT_BIAS, BALANCING) if name in rest]
            self._accept(" ".join(pair), True, joint)
        for name, value in rest.items():
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Translate a foreign flag. If its translation depends on other settings, it is deferred to `settle`.

        The value False turns off the settings that a switch would turn on. For other flags, False is the default of
        the other framework and is ignored.
        """
        outcome = FLAGS[name].outcome
        if value is False:
            if _is_switch(name):
                self._take(name, False, Means(dict.fromkeys(settings_for(name[2:].replace("-", "_")), False)))
        elif isinstance(outcome, Depends):
            self._waiting[name] = value
        else:
            self._take(name, value, outcome)

    def waiting(self) -> list[str]:
        """Return the foreign flags whose translation is deferred to `settle`."""
        return list(self._waiting)

    def follow(self, values: Mapping[str, Any], said: Container[str] = ()) -> dict[str, Any]:
        """Return the further settings that translated flags imply (`Means.unless`), and add a note for each such flag.

        values: all settings so far. Those that differ from their defaults are not overridden.
        said: names of settings that a source of higher precedence gives. They are not overridden, either.
        """
        found: dict[str, Any] = {}
        for given, new, outcome in self._open:
            more: dict[str, Any] = {}
            if all(values.get(setting) == value for setting, value in new.items()):
                more = _implied(outcome, values)
            for setting in list(more):
                if setting in said or setting in self.values or setting in found:
                    del more[setting]
            if new or more:
                self.notes.append(_taken(given, {**new, **more}, outcome.but if more else ""))
            else:
                settled = [written(flag(name), values.get(name, _USUAL[name])) for name in outcome.unless]
                self.notes.append(f"{given} has no effect: the run uses {' and '.join(settled)}")
            found |= more
        return found

    def settle(self, config: Config, ranks: int, change: Change) -> Config:
        """Apply the deferred flags to `config`, in the order of the table FLAGS, and return the result.

        change: function that returns a Config with some settings replaced.
        """
        for name in [each for each in FLAGS if each in self._waiting]:
            outcome = FLAGS[name].outcome
            assert isinstance(outcome, Depends)
            new = self._take(name, self._waiting[name], outcome.on(config, self._waiting[name], ranks))
            config = change(config, new) if new else config
        return config

    def _take(self, name: str, value: Any, outcome: Outcome) -> dict[str, Any]:
        said = f"{name} False" if value is False else brief(written(name, value), 300)
        if isinstance(outcome, ByValue):
            outcome = outcome.values.get(str(value)) or _refusal(outcome)
        return self._accept(said, value, outcome)

    def _accept(self, said: str, value: Any, outcome: Outcome) -> dict[str, Any]:
        """Add the outcome of a flag to values, notes or problems; return the new settings. said: the flag as typed."""
        if isinstance(outcome, Refused):
            self.problems.append(f"{said} is not accepted: {outcome.advice}")
        elif isinstance(outcome, NoEffect):
            self.notes.append(f"{said} has no effect: {outcome.why}")
        elif isinstance(outcome, Means):
            return self._set(said, value, outcome)
        return {}

    def _set(self, said: str, value: Any, outcome: Means) -> dict[str, Any]:
        """Set the settings to which a flag translates and return them; {} if another value is given for one of them."""
        new = {setting: v(value) if callable(v) else v for setting, v in outcome.settings.items()}
        for setting, v in new.items():
            if setting in self.values and self.values[setting] != v:
                other = self._said_by.get(setting) or written(flag(setting), self.values[setting])
                self.problems.append(f"{said} means {_ours(new)}, but {other} is given; leave one of them out")
                return {}
        self.values |= new
        self._said_by |= dict.fromkeys(new, said)
        if outcome.unless:
            self._open.append((said, new, outcome))
        else:
            self.notes.append(_taken(said, new, outcome.but))
        return new


def _implied(outcome: Means, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `outcome.unless` implies: those that still have their default in `values`."""
    implied = {}
    for setting, value in outcome.unless.items():
        usual = _USUAL[setting]
        if callable(value):
            value = value({**_USUAL, **values})
        if values.get(setting, usual) == usual != value:
            implied[setting] = value
    return implied


def _ours(new: Mapping[str, Any]) -> str:
    return " ".join(written(flag(setting), v) for setting, v in new.items())


def _taken(said: str, new: Mapping[str, Any], but: str) -> str:
    reason = f" ({but})" if but else ""
    return f"{said} translated to {_ours(new)}{reason}"

"""Possible outcomes of another framework's flag: settings of this project, no effect, or a refusal with advice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.sections import Config


def user_value(value: Any) -> Any:
    """Return `value` unchanged; in the tables, this function stands for the value that the user gave."""
    return value


@dataclass(frozen=True)
class Translated:
    """Translation to settings of this project.

    settings: setting -> its value: a constant, or a function of the value that the user gave.
    implied: further settings that the flag implies. Each is set unless the user has changed it from its default. The
    values are constants, or functions of the dict of all settings.
    note: text for the user. It explains `implied` if that is not empty, else the difference from the other framework.
    """

    settings: Mapping[str, Any]
    note: str = ""
    implied: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """Flag without effect in this project; `reason` is the text that the user is shown."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Flag without a counterpart in this project; `advice` is the text that the user is shown."""

    advice: str


Decision = Translated | NoEffect | Refused  # outcome that depends on nothing else


@dataclass(frozen=True)
class ByValue:
    """Outcome that depends on the flag's value.

    values: value of the flag -> its outcome.
    other: outcome for a value that is not in `values`; if None, such a value is refused.
    """

    values: "Mapping[str, Decision]"
    other: "Translated | Refused | None" = None


@dataclass(frozen=True)
class Depends:
    """Outcome that depends on other settings and the world size.

    translate: function (settings of the run, value of the flag, world size) -> outcome.
    summary: text for the documentation.
    """

    translate: "Callable[[Config, Any, int], Decision]"
    summary: str


Outcome = Decision | ByValue | Depends


@dataclass(frozen=True)
class Row:
    """Row of the translation table.

    names: flags that all have this outcome, separated by spaces.
    value_type: type of the flag's value; None for no value, list for several words, object for an optional value.
    """

    names: str
    outcome: Outcome
    value_type: type | None = None


def same_value(setting: str, note: str = "") -> Translated:
    """Return a translation to `setting` that keeps the value unchanged."""
    return Translated({setting: user_value}, note)


def sets(names: str, **settings: Any) -> Row:
    """Return a row of flags without a value, which set `settings`."""
    return Row(names, Translated(settings))


def renamed(names: str, setting: str, value_type: type) -> Row:
    """Return a row of flags that are other names of the flag of `setting`: they keep the value unchanged."""
    return Row(names, same_value(setting), value_type)


def only(spellings: str, reason: str) -> ByValue:
    """Return an outcome that accepts only the value that this project always uses; `reason` says so.

    spellings: ways to write the value, separated by spaces; a JSON file may have 0 for 0.0.
    """
    return ByValue(dict.fromkeys(spellings.split(), NoEffect(reason)), Refused(reason))


def no_effect(names: str, reason: str, value_type: type | None = None) -> Row:
    """Return a row of flags without effect in this project; `reason` is the text that the user is shown."""
    return Row(names, NoEffect(reason), value_type)


def refer_to_json(section: str, key: str) -> Refused:
    """Return a refusal that advises setting `section.key` in DeepSpeed's JSON file."""
    return Refused(f'write "{section}": {{"{key}": ...}} in --deepspeed-config')


def refused(names: str, advice: str, value_type: type | None = None) -> Row:
    """Return a row of flags without a counterpart in this project; `advice` is the text that the user is shown."""
    return Row(names, Refused(advice), value_type)


SAME_LOSS = NoEffect(
    "the flag does not change the loss; attention is always one fused kernel, and --compile fuses other operations"
)

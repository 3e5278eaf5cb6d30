"""Possible outcomes of another framework's flag: settings of this project, no effect, or a refusal with advice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.sections import Config


def given(value: Any) -> Any:
    """Return `value` unchanged; in the tables, this function stands for the value that the user gave."""
    return value


@dataclass(frozen=True)
class Means:
    """Translation to settings of this project.

    settings: setting -> its value: a constant, or a function of the value that the user gave.
    unless: further settings that the flag implies. Each is set unless the user has changed it from its default. The
    values are constants, or functions of the dict of all settings.
    but: note for the user. It explains `unless` if `unless` is not empty, else the difference from the other framework.
    """

    settings: Mapping[str, Any]
    but: str = ""
    unless: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """Flag without effect in this project; `why` is the reason that the user is shown."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Flag without a counterpart in this project; `advice` is the text that the user is shown."""

    advice: str


@dataclass(frozen=True)
class ByValue:
    """Outcome that depends on the flag's value.

    values: value of the flag -> its outcome.
    other: outcome for a value that is not in `values`; if None, such a value is refused.
    """

    values: "Mapping[str, Means | NoEffect | Refused]"
    other: "Means | Refused | None" = None


@dataclass(frozen=True)
class Depends:
    """Outcome that depends on other settings and the world size.

    on: function (settings of the run, value of the flag, world size) -> outcome. says: summary for the documentation.
    """

    on: "Callable[[Config, Any, int], Means | NoEffect | Refused]"
    says: str


Outcome = Means | NoEffect | Refused | ByValue | Depends


@dataclass(frozen=True)
class Row:
    """Row of the translation table.

    names: flags that all have this outcome, separated by spaces.
    takes: type of the flag's value; None for no value, list for several words, object for an optional value.
    """

    names: str
    outcome: Outcome
    takes: type | None = None


def same(setting: str, but: str = "") -> Means:
    """Return a translation to `setting` that keeps the value unchanged."""
    return Means({setting: given}, but)


def in_json(section: str, key: str) -> Refused:
    """Return a refusal that advises setting `section.key` in DeepSpeed's JSON file."""
    return Refused(f'write "{section}": {{"{key}": ...}} in --deepspeed-config')


SAME_LOSS = NoEffect(
    "the flag does not change the loss; attention is always one fused kernel, and --compile fuses other operations"
)

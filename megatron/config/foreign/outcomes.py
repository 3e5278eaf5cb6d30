"""Outcomes of another project's flag: settings of this project, no effect, or a refusal with advice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..sections import Config


def given(value: Any) -> Any:
    """Return `value` unchanged; in the tables it stands for the value that the user gave."""
    return value


@dataclass(frozen=True)
class Means:
    """Translation to settings of this project.

    settings: each value is a constant or a function of the value that the user gave.
    but: note on what differs from the original project; with `unless`, it describes the settings of `unless`.
    unless: further settings that apply only where the user leaves them at their defaults. Each value is a constant
    or a function of all flat settings.
    """

    settings: Mapping[str, Any]
    but: str = ""
    unless: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """Flag without effect in this project; `why` is the explanation shown."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Flag without a counterpart in this project; `advice` is the text shown."""

    advice: str


@dataclass(frozen=True)
class ByValue:
    """Outcome that depends on the flag's value.

    other: outcome for values that are not in `values`; None refuses them.
    """

    values: "Mapping[str, Means | NoEffect | Refused]"
    other: "Means | Refused | None" = None


@dataclass(frozen=True)
class Depends:
    """Outcome that depends on the other settings and the world size: on(config, value, ranks).

    says: summary for the documentation.
    """

    on: "Callable[[Config, Any, int], Means | NoEffect | Refused]"
    says: str


Outcome = Means | NoEffect | Refused | ByValue | Depends


@dataclass(frozen=True)
class Row:
    """Row of the translation table.

    names: flags, separated by spaces.
    takes: type of the value; None for a flag without value, list for several words, object for an optional value.
    """

    names: str
    outcome: Outcome
    takes: type | None = None


def same(setting: str, but: str = "") -> Means:
    """Return a translation to the setting `setting` with the value unchanged."""
    return Means({setting: given}, but)


def in_json(section: str, key: str) -> Refused:
    """Return a refusal that advises to set `section.key` in DeepSpeed's JSON."""
    return Refused(f'write "{section}": {{"{key}": ...}} in --deepspeed-config')


SAME_LOSS = NoEffect(
    "it does not change the loss; attention is always one fused kernel, and --compile fuses other operations"
)

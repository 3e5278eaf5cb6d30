"""What a flag of another project comes to here: settings of ours, nothing, or a refusal with advice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .sections import Config


def given(value: Any) -> Any:
    """Stands in a table for the value on the command line; another function makes ours of it."""
    return value


@dataclass(frozen=True)
class Means:
    """Settings of ours, a value each or a function of what is given. but: what a user has to know of the difference.

    unless: settings that follow from it where nobody says them, a value each or a function of all settings by their flat names; `but`
    is of these then.
    """

    settings: Mapping[str, Any]
    but: str = ""
    unless: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoEffect:
    """Nothing depends on it here."""

    why: str


@dataclass(frozen=True)
class Refused:
    """Nothing of ours has its meaning."""

    advice: str


@dataclass(frozen=True)
class ByValue:
    """Another outcome for each value. other: of all that are not named; they are refused without one."""

    values: "Mapping[str, Means | NoEffect | Refused]"
    other: "Means | Refused | None" = None


@dataclass(frozen=True)
class Depends:
    """What it comes to follows from the other settings and the number of ranks: on(config, value, ranks)."""

    on: "Callable[[Config, Any, int], Means | NoEffect | Refused]"
    says: str


Outcome = Means | NoEffect | Refused | ByValue | Depends


@dataclass(frozen=True)
class Row:
    """names: the flags, a space between two. takes: the type of their value, None for none, list for several words, object for one or none."""

    names: str
    outcome: Outcome
    takes: type | None = None


def same(setting: str, but: str = "") -> Means:
    """A setting of ours with another name."""
    return Means({setting: given}, but)


def in_json(section: str, key: str) -> Refused:
    """What DeepSpeed's JSON says."""
    return Refused(f'write "{section}": {{"{key}": ...}} in --deepspeed-config')


SAME_LOSS = NoEffect("the loss is the same here; torch's attention is one kernel, --compile fuses what else can be")

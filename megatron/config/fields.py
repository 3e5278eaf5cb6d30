"""Declaration of settings: each setting is a field of a frozen dataclass, with a help text and a check.

For example, optim.py has `lr: float = opt(1.5e-4, "peak learning rate", at_least(0))`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_args, get_origin, get_type_hints

from ..json_text import brief

Check = Callable[[Any], str | None]  # returns an error text for an invalid value, else None


class ConfigError(ValueError):
    """Invalid settings of a run; the message says what to change."""


def flag(name: str) -> str:
    """Return the command-line flag of the field `name`."""
    return "--" + name.replace("_", "-")


def at_least(low: float) -> Check:
    """Return a check that gives an error text for values below `low`, else None."""
    return lambda value: None if value >= low else f"must be at least {low:g}"


def more_than(low: float) -> Check:
    """Return a check that gives an error text for values not above `low`, else None."""
    return lambda value: None if value > low else f"must be more than {low:g}"


def between(low: float, high: float) -> Check:
    """Return a check that gives an error text for values outside `low` to `high`, else None."""
    return lambda value: None if low <= value <= high else f"must lie between {low:g} and {high:g}"


@dataclass(frozen=True)
class OneOf:
    """Check that a value is one of a few choices, which `--help` lists."""

    choices: tuple[Any, ...]

    def __call__(self, value: Any) -> str | None:
        return None if value in self.choices else f"must be one of {', '.join(map(str, self.choices))}"


def one_of(*choices: Any) -> OneOf:
    """Return a check that gives an error text for values outside `choices`, else None."""
    return OneOf(choices)


def opt(
    default: Any,
    help: str,
    check: Check | None = None,
    family: tuple[str, ...] | None = None,
    mutable: bool = False,
) -> Any:
    """Return a dataclass field for a setting: its default, the help of its flag and a check of its value.

    check: function that returns an error text for an invalid value, else None.
    family: model families that read the setting; None for all families.
    mutable: for a setting of the model, whether its value may change when a run resumes.
    """
    metadata = {"help": help, "check": check, "family": family, "mutable": mutable}
    return field(default=default, metadata=metadata)


def raise_first_problem(*checks: Iterable[str]) -> None:
    """Raise ConfigError with the first problem that `checks` yield; return if they yield none."""
    for problem in itertools.chain(*checks):
        raise ConfigError(problem)


def problems_where(*cases: tuple[Any, str]) -> Iterator[str]:
    """Yield the error text of each case (condition, error text) whose condition holds."""
    for holds, problem in cases:
        if holds:
            yield problem


def _value_problem(value: Any, types: tuple[type, ...], check: Check | None) -> str | None:
    """Return what is wrong with a value, as the rest of a sentence that begins with its flag; None if it is valid."""
    if type(value) not in types:  # not isinstance(), for which True is an int
        declared = " or ".join(kind.__name__ for kind in types if kind is not type(None))
        return f"must be {declared}, got {brief(repr(value))}"
    if type(value) is int and abs(value) >= 2**64:
        return f"{brief(value)} must be less than 2**64"
    if type(value) is float and not math.isfinite(value):
        return f"{value} must be a finite number"
    problem = check(value) if check else None
    if not problem:
        return None
    words = " ".join(value) if isinstance(value, tuple) else value
    or_none = ", or none" if type(None) in types else ""
    return f"{brief(words)} {problem}{or_none}"  # such as: -1 must be at least 0, or none


class Section:
    """Base class of the sections of settings; checks the types and values of their fields."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value of another type, one that is too large or not finite, and one out of range."""
        for f in fields(self):  # type: ignore[arg-type]
            types = types_of(type(self), f.name)  # e.g. int and NoneType
            value = _to_declared_type(getattr(self, f.name), types)
            if value is None and type(None) in types:  # None is valid
                continue
            object.__setattr__(self, f.name, value)  # the dataclass is frozen
            problem = _value_problem(value, types, f.metadata["check"])
            if problem:
                raise ConfigError(f"{flag(f.name)} {problem}")
        raise_first_problem(self._problems())  # contradictions between fields

    def _problems(self) -> Iterator[str]:
        """Yield an error text for each contradiction between fields of the section."""
        return iter(())


_type_hints = functools.cache(get_type_hints)


def types_of(section: type, name: str) -> tuple[type, ...]:
    """Return the types that a field's value may have, e.g. int and NoneType for `int | None`."""
    hint = _type_hints(section)[name]
    # The arguments of `int | None` are types of the value; those of tuple[str, ...] are types of its items.
    alternatives = get_args(hint) if type(None) in get_args(hint) else (hint,)
    return tuple(get_origin(each) or each for each in alternatives)  # the origin of tuple[str, ...] is tuple


def _to_declared_type(value: Any, types: tuple[type, ...]) -> Any:
    """Return a text or a list as a tuple, and an int as a float, if the field is declared with that type."""
    if tuple in types and isinstance(value, str):
        return (value,)
    if tuple in types and isinstance(value, list):
        return tuple(map(str, value))
    if float in types and type(value) is int:  # not True or False, which are no numbers here
        return float(value)
    return value

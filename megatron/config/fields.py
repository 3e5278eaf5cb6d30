"""How a setting is declared: once, as a field of a frozen dataclass, with its help and its check."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from json import JSONDecodeError
from typing import Any, get_args, get_origin, get_type_hints

from ..json_text import describe_json


class ConfigError(ValueError):
    """The run was described in a way that cannot work; the message says what to change."""


def describe(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, JSONDecodeError):
        return describe_json(error.doc, error)
    return " ".join(str(error).split()) or type(error).__name__


def flag(name: str) -> str:
    """How a user spells the field `name`."""
    return "--" + name.replace("_", "-")


def at_least(low: float) -> Callable[[Any], str | None]:
    """A check of a setting: what is wrong with a value, or None."""
    return lambda value: None if value >= low else f"must be at least {low:g}"


def more_than(low: float) -> Callable[[Any], str | None]:
    """A check of a setting: what is wrong with a value, or None."""
    return lambda value: None if value > low else f"must be more than {low:g}"


def between(low: float, high: float) -> Callable[[Any], str | None]:
    """A check of a setting: what is wrong with a value, or None."""
    return lambda value: None if low <= value <= high else f"must lie between {low:g} and {high:g}"


@dataclass(frozen=True)
class OneOf:
    """A check of a setting that is one of a few words, which `--help` lists."""

    choices: tuple[Any, ...]

    def __call__(self, value: Any) -> str | None:
        return None if value in self.choices else f"must be one of {', '.join(map(str, self.choices))}"


def one_of(*choices: Any) -> OneOf:
    """A check of a setting: what is wrong with a value, or None."""
    return OneOf(choices)


def each_of(*choices: Any) -> Callable[[Any], str | None]:
    """For settings that name several things."""
    return lambda values: None if set(values) <= set(choices) else f"may name only {', '.join(map(str, choices))}"


def is_range(word: str) -> bool:
    """Whether this is a number, or two with a dash between them of which the second is no less."""
    first, dash, last = word.partition("-")
    return first.isdecimal() and (not dash or (last.isdecimal() and int(last) >= int(first)))


def opt(
    default: Any,
    help: str,
    check: Callable[[Any], str | None] | None = None,
    family: tuple[str, ...] | None = None,
    free: bool = False,
) -> Any:
    """A setting with its default, the help of its flag, and a check that returns what is wrong.

    family: those of models that read it; all do if None. free: a run may go on with another value of it, though it is of the model.
    """
    return field(default=default, metadata={"help": help, "check": check, "family": family, "free": free})


class Section:
    """Base of the sections: checks types and values of all fields."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value, kinds = getattr(self, f.name), types_of(type(self), f.name)
            if value is None and type(None) in kinds:
                continue
            if tuple in kinds and isinstance(value, (str, list)):
                value = (value,) if isinstance(value, str) else tuple(map(str, value))
                object.__setattr__(self, f.name, value)
            if float in kinds and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) not in kinds:
                wanted = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
                raise ConfigError(f"{flag(f.name)} must be {wanted}, got {value!r}")
            check = f.metadata["check"]
            problem = check(value) if check else None
            if problem:
                off = ", or none" if type(None) in kinds else ""
                raise ConfigError(f"{flag(f.name)} {value} {problem}{off}")


@functools.cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section)


def types_of(section: type, name: str) -> tuple[type, ...]:
    """The types a field may have, `int | None` taken apart."""
    hint = _hints(section)[name]
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    return tuple(get_origin(kind) or kind for kind in kinds)

"""The parser of the command line: one flag per setting, and its `--help`."""

import argparse
from collections.abc import Callable
from dataclasses import Field
from functools import partial
from typing import Any, NoReturn

from .._compat import compat
from ..json_text import brief
from .fields import ConfigError, OneOf, flag, types_of
from .sections import settings


class SettingsParser(argparse.ArgumentParser):
    """Parser that raises ConfigError for a mistake instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(brief(message, 500))


def build_parser(foreign: bool = True) -> argparse.ArgumentParser:
    """Return a parser with one flag per setting; its result contains only the flags that are given.

    foreign: accept flags of other frameworks, too.
    """
    parser = SettingsParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", action="append", metavar="FILE")
    for _, section, f in settings():
        parser.add_argument(flag(f.name), **_form(section, f))
    # Launchers pass this flag to every process. It is ignored, as the environment has the rank.
    parser.add_argument("--local_rank", "--local-rank", type=int)
    if foreign:
        compat("flags.translate").add_to(parser)
    return parser


def _form(section: type, setting: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    kinds = types_of(section, setting.name)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(each for each in kinds if each is not type(None))
    form: dict[str, Any] = {"metavar": metavar(setting, kind)}
    if kind is tuple:
        return form | {"nargs": "+", "type": str, "action": partial(_Words, none=setting.default)}
    return form | {"type": _or_none(kind) if type(None) in kinds else kind}


def _or_none(kind: type) -> Callable[[str], Any]:
    """Return a function that converts the word `none` to None and any other word to `kind`.

    The word `none` after a flag removes an optional setting that a --config file sets.
    """

    def read(word: str) -> Any:
        return None if word == "none" else kind(word)

    read.__name__ = kind.__name__  # argparse prints this name in its own messages
    return read


class _Words(argparse.Action):
    """Argument that takes several words, or the single word `none`, which stands for the setting's default."""

    def __init__(self, *args: Any, none: tuple[str, ...] | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.none = none

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.none if values == ["none"] else values)


def metavar(setting: "Field[Any]", kind: type) -> str:
    """Return the placeholder that `--help` shows for a setting's value: its choices or its type."""
    check = setting.metadata["check"]
    if isinstance(check, OneOf):
        return "{" + ",".join(str(choice) for choice in check.choices if choice is not None) + "}"
    if kind is not tuple:
        return kind.__name__.upper()
    if setting.name.endswith("_path"):
        return "PATH"
    return "A-B" if setting.name.startswith("skip_") else "NAME"

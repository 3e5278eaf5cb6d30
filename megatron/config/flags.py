"""The flags of the command line: one per setting, and those of other frameworks."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import Field
from functools import cache
from typing import Any, NamedTuple, NoReturn

from .._compat import compat
from ..json_text import brief
from .fields import ConfigError, OneOf, flag, types_of
from .sections import settings


class _Flags(NamedTuple):
    """The content of a command line: settings, flags of other frameworks, files of --config, and unknown words."""

    settings: dict[str, Any]
    foreign: dict[str, Any]
    files: list[str]
    unknown: list[str]


def read_flags(words: Sequence[str]) -> _Flags:
    """Parse the words of a command line. Flags of other frameworks are known only if there is an unknown one."""
    namespace, unknown = _shared_parser(foreign=False).parse_known_args(words)
    if unknown:  # flags of another framework, or mistakes
        namespace, unknown = _shared_parser(foreign=True).parse_known_args(words)
    values = vars(namespace)
    values.pop("local_rank", None)  # no setting: launchers pass it
    foreign = values.pop("foreign", {})
    files = values.pop("config", [])
    for _, _, setting in settings():
        # After a flag that takes several words, the single word `none` stands for the setting's default.
        if values.get(setting.name) == ["none"]:
            values[setting.name] = setting.default
    return _Flags(values, foreign, files, unknown)


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
        parser.add_argument(flag(f.name), **_argument_options(section, f))
    # Launchers pass this flag to every process. It is ignored, as the environment has the rank.
    parser.add_argument("--local_rank", "--local-rank", type=int)
    if foreign:
        compat("flags.translate").add_foreign_flags(parser)
    return parser


# For all command lines of this process, as building a parser takes longer than parsing with it.
_shared_parser = cache(build_parser)


def _argument_options(section: type, setting: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a setting."""
    kinds = types_of(section, setting.name)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = kinds[0]  # int for `int | None`
    options: dict[str, Any] = {"metavar": metavar(setting, kind)}
    if kind is tuple:
        return options | {"nargs": "+", "type": str}
    return options | {"type": _or_word_none(kind) if type(None) in kinds else kind}


def _or_word_none(kind: type) -> Callable[[str], Any]:
    """Return a function that converts the word `none` to None and any other word to `kind`.

    The word `none` after a flag removes an optional setting that a --config file sets.
    """

    def convert(word: str) -> Any:
        return None if word == "none" else kind(word)

    convert.__name__ = kind.__name__  # argparse prints this name in its own messages
    return convert


def metavar(setting: "Field[Any]", kind: type) -> str:
    """Return the placeholder that `--help` shows for a setting's value: its choices or its type."""
    check = setting.metadata["check"]
    if isinstance(check, OneOf):
        return "{" + ",".join(str(choice) for choice in check.choices if choice is not None) + "}"
    if kind is not tuple:
        return kind.__name__.upper()
    if setting.name.endswith("_path"):
        return "PATH"
    return "A-B" if setting.name.startswith("skip_") else "NAME"  # --skip-iterations and --skip-samples take ranges

"""Wording of messages: errors, lists of names, problems, and flags with their values."""

import errno
from collections.abc import Sequence
from json import JSONDecodeError
from typing import Any

from ..json_text import describe_json


def describe_error(error: BaseException) -> str:
    """Return the message of an error as one line."""
    # The str() of an OSError begins with its number: [Errno 24] Too many open files: 'a.bin'.
    if isinstance(error, OSError) and error.strerror:
        path = f": {error.filename}" if error.filename else ""
        # EMFILE: this process has too many open files.
        advice = "; raise the limit with ulimit -n" if error.errno == errno.EMFILE else ""
        return error.strerror + path + advice
    if isinstance(error, JSONDecodeError):
        return describe_json(error.doc, error)
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as str_error:  # a user's class may have a faulty `__str__`
        message = f"{name} without a message, because its str() raised {type(str_error).__name__}"
    return " ".join(message.split()) or name  # the message may be empty, such as that of a bare assert


def shorten_list(names: Sequence[object], most: int = 8) -> str:
    """Return the first `most` names, separated by commas, and the number of further names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + rest


def format_problems(problems: Sequence[str], title: str) -> str:
    """Return a single problem unchanged; for several, a first line `N title:`, followed by one line per problem."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"{len(problems)} {title}:", *problems])


def format_flag(name: str, value: Any) -> str:
    """Return a flag and its value as typed on a command line."""
    if isinstance(value, bool):
        return name if value else f"--no-{name.removeprefix('--')}"
    if value is None:
        return f"{name} none"
    words = value if isinstance(value, (list, tuple)) else (value,)
    return " ".join(map(str, (name, *words)))

"""Reading of JSON that a user or another program wrote: bounds, duplicate keys and errors of one sentence."""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
MAX_NESTING = 100  # levels of objects and lists; a tokenizer.json has about 20
MAX_DIGITS = 300  # digits of an integer, which then fits a float
MAX_SHOWN = 120  # characters of a value in a message
_KIND_NAMES = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", dict: "an object",
}  # fmt: skip
# A string, whose last quote may be missing, or a bracket. Every text matches in linear time.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)


class JsonError(ValueError):
    """Text that is not JSON, or not of the kind that a reader needs; the message names the file and the line."""


class JsonBoundError(JsonError):
    """Valid JSON that is nested too deeply, has a number of too many digits, or has a key twice."""


def format_value(value: object, max_length: int = MAX_SHOWN) -> str:
    """Return a value from a file as JSON text for a message, shortened to `max_length` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return brief(text, max_length)


def brief(text: object, max_length: int = MAX_SHOWN) -> str:
    """Return a text for a message, as one line shortened to `max_length` characters."""
    words = " ".join(str(text).splitlines())
    return words if len(words) <= max_length else f"{words[: max_length - 3]}..."


def parse_json(text: str, where: str, kind: type | None = None, constants: bool = True) -> Any:
    """Return the content of a JSON text.

    where: file or flag, for messages. kind: dict or list, if the content must be an object or a list. constants:
    whether NaN and infinities are allowed, which JSON does not have but Python writes.
    Raises JsonError, whose message begins with `where`.
    """
    if line := _find_too_deep_line(text):
        raise JsonBoundError(f"{where}, line {line}: the JSON is nested too deeply (more than {MAX_NESTING} levels)")
    hooks: dict[str, Any] = {
        "object_pairs_hook": partial(_reject_duplicates, where),
        "parse_int": partial(_parse_integer, where, text),
    }
    if not constants:
        hooks["parse_constant"] = partial(_reject_constant, where)
    try:
        content = json.loads(text, **hooks)
    except JSONDecodeError as error:
        raise JsonError(f"{where}, {describe_json(text, error)}") from None
    if kind is not None and not isinstance(content, kind):
        wanted = "object" if kind is dict else "list"
        found = _KIND_NAMES.get(type(content), type(content).__name__)
        raise JsonError(f"{where} must hold a JSON {wanted}, found {found}")
    return content


def read_json(path: Path, kind: type[T]) -> T:
    """Return the content of the JSON file `path`, which is of type `kind`; see `parse_json`.

    Raises JsonError, which names the file, and OSError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"{path} is {why_unreadable(error)}") from None
    content: T = parse_json(text, str(path), kind)
    return content


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a text file. Raises JsonError, which names the file, if it is not UTF-8, and OSError."""
    try:
        # `str.splitlines` would also split at U+2028, which a text may contain.
        with open(path, encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise JsonError(f"{path} is {why_unreadable(error)}") from None


def is_list(value: Any, is_valid: Callable[[Any], bool], length: int | None = None) -> bool:
    """Return whether a value is a list, of `length` items if given, that are all `is_valid`."""
    return isinstance(value, list) and length in (None, len(value)) and all(map(is_valid, value))


def is_object(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    """Return whether a value is an object whose values are all `is_valid`."""
    return isinstance(value, dict) and all(map(is_valid, value.values()))


def are_number_pairs(value: Any) -> bool:
    """Return whether a value is a list of pairs of finite numbers, none of them a whole number."""
    return is_list(value, lambda pair: is_list(pair, lambda x: type(x) is float and math.isfinite(x), 2))


def why_unreadable(error: OSError | ValueError) -> str:
    """Return why a file cannot be read as text, without its name."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start + 1}"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _find_too_deep_line(text: str) -> int:
    """Return the line at which brackets are nested too deeply, or 0."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return 0  # most texts have so few brackets that no search is needed
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
        elif bracket in "]}":
            depth -= 1
        if depth > MAX_NESTING:
            return text.count("\n", 0, match.start()) + 1
    return 0


def _reject_duplicates(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises JsonBoundError if a key occurs twice."""
    content = dict(pairs)
    if len(content) == len(pairs):  # each key occurs once
        return content
    # The message names the first key that occurs again, with the first two of its values.
    seen = set()
    repeated = ""
    for key, _ in pairs:
        if key in seen:
            repeated = key
            break
        seen.add(key)
    values = [format_value(value) for key, value in pairs if key == repeated]
    ellipsis = " and more" if len(values) > 2 else ""
    raise JsonBoundError(f"{where} sets {brief(repr(repeated))} more than once: {' and '.join(values[:2])}{ellipsis}")


def _parse_integer(where: str, text: str, word: str) -> int:
    if len(word) > MAX_DIGITS:
        line = text.count("\n", 0, text.find(word)) + 1
        digits = len(word.removeprefix("-"))
        raise JsonBoundError(f"{where}, line {line}: a number of {digits} digits, too many for any setting or count")
    return int(word)


def _reject_constant(where: str, word: str) -> Any:
    raise JsonError(f"{where} contains {word}, which is not a number of JSON")


def describe_json(text: str, error: JSONDecodeError) -> str:
    """Return the line and the mistake if `text` is not JSON, with a specific message for the most common mistakes."""
    before = text[: error.pos].rstrip()
    after = text[error.pos :].lstrip()
    if after.startswith(","):  # Python 3.13 reports the comma, older versions what follows it
        before = f"{before},"
        after = after[1:].lstrip()
    if before.endswith(",") and after[:1] in ("}", "]"):
        # chr(10) is a newline. Before Python 3.12, the braces of an f-string may not contain a backslash.
        return f"line {before.count(chr(10)) + 1}: JSON does not allow a comma before {after[0]}"
    if after.startswith(("//", "#", "/*")):
        return f"line {error.lineno}: JSON does not allow comments"
    return f"line {error.lineno}: {error.msg}"

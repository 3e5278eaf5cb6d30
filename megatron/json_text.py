"""One-line descriptions of mistakes in hand-written JSON, with the line number."""

import re
import sys
from json import JSONDecodeError

_TOO_LONG = re.compile(r"integer string conversion: value has (\d+) digits")


def describe_json(text: str, error: ValueError) -> str:
    """Return why `text` is not valid JSON, given the error that `json.loads` raised."""
    if isinstance(error, JSONDecodeError):
        return _describe_syntax(error)
    if found := _TOO_LONG.search(str(error)):
        digits = re.search(rf"\d{{{sys.get_int_max_str_digits() + 1},}}", text)
        line = f"line {text.count(chr(10), 0, digits.start()) + 1}: " if digits else ""
        return f"{line}a number of {found[1]} digits, too many for any setting or count"
    return " ".join(str(error).split())


def _describe_syntax(error: JSONDecodeError) -> str:
    """Return the line and the mistake, with a specific message for the most common mistakes."""
    before = error.doc[: error.pos].rstrip()
    after = error.doc[error.pos :].lstrip()
    if after.startswith(","):  # Python 3.13 reports the comma, older versions what follows it
        before = f"{before},"
        after = after[1:].lstrip()
    if before.endswith(",") and after[:1] in ("}", "]"):
        return f"line {before.count(chr(10)) + 1}: JSON does not allow a comma before {after[0]}"
    if after.startswith(("//", "#", "/*")):
        return f"line {error.lineno}: JSON does not allow comments"
    return f"line {error.lineno}: {error.msg}"

"""Documents that training leaves out (`--without`), by the sample from which they are left out.

A file has a line for each document or range of documents: `17`, `20-31`, or with several corpora `data/a 17`. The
settings keep the content instead of the name of the file, as JSON: `[{"samples": 0, "documents": {"data/a": ["17"]}}]`.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..json_text import JsonError, brief, parse_json, shown, why_unread
from .fields import ConfigError

LINE = re.compile(r"(?:(.+?)\s+)?(\d{1,30})(?:-(\d{1,30}))?")
NO_NAME = ""  # name of the only corpus in a file that names none


class Omission(NamedTuple):
    """Documents that are left out from sample `begin` on, as corpus -> ranges such as `17` and `20-31`."""

    begin: int
    documents: dict[str, list[str]]


def parse_without(text: str | None) -> list[Omission]:
    """Return what --without leaves out; text: the name of a file or JSON text. Without --without, nothing.

    Raises ConfigError if the file cannot be read or has another form.
    """
    if text is None:
        return [Omission(0, {})]
    if not text.startswith("["):
        return [Omission(0, _of_file(Path(text)))]
    try:
        content = parse_json(text, "--without", list)
    except JsonError as error:
        raise ConfigError(str(error)) from None
    return [_of_json(each) for each in content]


def _of_json(entry: Any) -> Omission:
    """Return an entry of the JSON text. Raises ConfigError if it has another form."""
    content: dict[str, Any] = entry if isinstance(entry, dict) else {}
    begin: Any = content.get("samples")
    documents: Any = content.get("documents")
    sound = type(begin) is int and 0 <= begin < 2**63 and isinstance(documents, dict)
    lists = documents.values() if sound else ()
    if not sound or not all(isinstance(ranges, list) and all(map(_is_range, ranges)) for ranges in lists):
        raise ConfigError(
            f'--without: {shown(entry)} must have the form {{"samples": 0, "documents": {{"data/a": ["17", "20-31"]}}}}'
        )
    return Omission(begin, documents)


def _is_range(word: Any) -> bool:
    """Return whether `word` is a document number or an ascending range of them."""
    match = LINE.fullmatch(word) if isinstance(word, str) else None
    return match is not None and match[1] is None and int(match[3] or match[2]) >= int(match[2])


def text_of(omissions: Sequence[Omission]) -> str:
    """Return JSON text, which `parse_without` reads."""
    return json.dumps([{"samples": begin, "documents": names} for begin, names in omissions], ensure_ascii=False)


def with_names(text: str, change: Callable[[str], str]) -> str:
    """Return JSON text with each name of a corpus replaced by `change(name)`."""
    found = parse_without(text)
    return text_of([Omission(begin, {change(name): r for name, r in names.items()}) for begin, names in found])


def _of_file(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, ranges in _lines(path):
        found.setdefault(name, []).append(ranges)
    if not found:
        raise ConfigError(f"--without {path} names no document; write a line such as 17 or data/a 17 for each")
    if NO_NAME in found and len(found) > 1:
        raise ConfigError(f"--without {path}: only some lines name a corpus; write each as PREFIX NUMBER")
    return found


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--without {brief(path)} cannot be read: {why_unread(error)}") from None
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        match = LINE.fullmatch(words)
        if words and (match is None or int(match[3] or match[2]) < int(match[2])):
            raise ConfigError(
                f"--without {path}, line {number}: {brief(repr(words), 80)} is not a document number such as 17, a "
                f"range such as 20-31, or a corpus and one of these, as in data/a 17"
            )
        if match:
            yield match[1] or NO_NAME, f"{match[2]}-{match[3]}" if match[3] else match[2]

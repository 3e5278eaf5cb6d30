"""Text of one document: a record's values under some keys, or plain text."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.config.messages import shorten_list
from megatron.json_text import brief

from .files import Source, format_suffix
from .streams import decode_error_place, encoding_hint, is_utf8

_LINE_BREAK = re.compile("\r\n?")
_OUTER_BLANK_LINES = re.compile("^(?:[^\\S\n]*\n)+|(?:\n[^\\S\n]*)+$")  # blank lines before and after a text

ONE_LINE = "write each record on a line of its own, or a list of records into a .json file"
ExtractTexts = Callable[[Any], tuple[Any, ...]]


def parse_document(raw: bytes, source: Source, keys: Sequence[str] | ExtractTexts, is_first: bool) -> tuple[Any, ...]:
    """Return the texts under `keys` of the document `raw`. Raises ValueError for an unreadable document.

    keys: as for `documents.documents`. is_first: whether the document is the first of its file.
    """
    text = _decode(raw, source.encoding)
    if format_suffix(source.path) == ".txt":
        if callable(keys):
            raise ValueError("a .txt file contains no records with messages; convert it to .jsonl, .csv or .parquet")
        if is_first:
            text = text.removeprefix("\ufeff")  # a byte-order mark; elsewhere, the character belongs to the text
        lines = _LINE_BREAK.sub("\n", text)
        return (_OUTER_BLANK_LINES.sub("", lines),) * len(keys)  # plain text counts as the text under each key
    try:
        record = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        hint = f"; {ONE_LINE}" if text.strip() in ("{", "[") else ""
        raise ValueError(f"the record is not JSON ({error.msg} at column {error.colno}){hint}") from None
    except ValueError:  # Python refuses integers of more than 4300 digits
        raise ValueError("the record is not JSON (a number has more than 4300 digits)") from None
    except RecursionError:
        raise ValueError("the record is not JSON (nested too deeply)") from None
    if callable(keys):
        return keys(record)
    if not isinstance(record, dict):
        raise ValueError(f"the record is not a JSON object; {ONE_LINE}")
    texts = []
    for key in keys:
        value = record.get(key)
        if not isinstance(value, str):
            raise ValueError(f"the record has no text under the key {key!r}{_missing_text_hint(record, key)}")
        # Only an escape can write half of a surrogate pair, and the check of every text would take time.
        if "\\u" in text or "\\U" in text:
            check_surrogates(value)
        texts.append(value)
    return tuple(texts)


def _missing_text_hint(record: dict[str, Any], key: str) -> str:
    """Return what `record` has instead of a text under `key`: another value, texts under other keys, or "" for neither.

    The result is the end of an error message.
    """
    if key in record:
        return f", but {brief(json.dumps(record[key]), 40)}"
    others = [brief(name, 40) for name, other in record.items() if isinstance(other, str)]
    return f", but under {shorten_list(others, 5)}: pass that as --json-key" if others else ""


def _decode(raw: bytes, encoding: str) -> str:
    """Decode a document. encoding: that of its file, whose content was converted to UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if not is_utf8(encoding):
            raise ValueError(f"the text is not {encoding}") from None
        raise ValueError(f"the text is not UTF-8 ({decode_error_place(error)}){encoding_hint(raw)}") from None
    # More than a fifth of zero bytes means UTF-16 or binary data.
    if raw.count(0) * 5 > len(raw):
        raise ValueError(f"the document is not text but mostly zero bytes{encoding_hint(raw)}")
    return text


def check_surrogates(value: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON can write as an escape."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text contains half of a surrogate pair, which is not valid Unicode") from None


def texts_in(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, also the keys of objects."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            pending += each

"""Sequential readers for files of records (CSV, JSON arrays, parquet); each record is returned as one line of JSON.

An unreadable record does not affect the next one.
"""

import codecs
import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from megatron.packages import pip_install

from .files import Source, format_suffix
from .streams import BadLine, InputError, decode_error_place, open_text, read_blocks

Record = tuple[int, bytes]  # (number of the record's first line or, for parquet, of its row, from 1; record as JSON)
BLOCK = 1 << 20
# Suffix of a format -> what ends a document in its files; in those of other formats, a line break.
_DOCUMENT_ENDS = {
    ".txt": "a blank line", ".csv": "a line break outside quotes", ".parquet": "its row",
    ".json": "a line break or, in an array, the } of its object",
}  # fmt: skip


def is_array(path: str, encoding: str) -> bool:
    """Return True if a .json file holds one array instead of an object per line."""
    # Two blocks suffice to see past a byte-order mark and white space.
    head = b"".join(islice(read_blocks(path, 4096, encoding), 2))
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def overlong_message(largest: int, suffix: str | None) -> str:
    """Return the error for a document above --max-document-mb. suffix: that of its file's format."""
    end = _DOCUMENT_ENDS.get(suffix or "", "a line break")
    return f"the document exceeds --max-document-mb ({largest} bytes); a document ends with {end}"


def records(source: Source, largest: int) -> Iterator[Record | BadLine]:
    """Return the records of a file in order, with a BadLine for each unreadable one.

    largest: maximum size of a record in bytes. Raises InputError if the file as a whole is unreadable.
    """
    kind = format_suffix(source.path)
    if kind == ".csv":
        return _csv_rows(source.path, source.encoding, largest)
    if kind == ".parquet":
        return _parquet_rows(source.path)
    # A .json file with one array. Files with an object per line are not read by this function.
    return _JsonArray(source.path, source.encoding, largest).items()


class _CsvLines:
    """Lines of a CSV file, with the state of the current record: its first line, its size, whether a quote is open."""

    def __init__(self, path: str, encoding: str, largest: int) -> None:
        self._file = open_text(path, encoding)
        self._largest = largest
        self.number = 0
        self.begin_record()  # sets `start`, `size` and `in_quotes`

    def begin_record(self) -> None:
        self.start = self.number + 1
        self.size = 0
        self.in_quotes = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Return the next line. If the record exceeds the limit, read to its end and raise csv.Error."""
        line = self._read_part()
        if not line:
            raise StopIteration
        if self.size > self._largest:
            # The record ends with a line break outside quotes, or with the file ("").
            part = line
            while part and (self.in_quotes or not part.endswith(("\n", "\r"))):
                part = self._read_part()
            raise csv.Error(overlong_message(self._largest, ".csv"))
        return line

    def _read_part(self) -> str:
        """Read a line, or as much of a longer one as a record may have."""
        part = self._file.readline(self._largest + 1)
        self.number += part.endswith(("\n", "\r"))
        self.size += len(part)
        self.in_quotes ^= part.count('"') % 2 == 1  # an even number of quotes closes as many as it opens
        return part


def _csv_rows(path: str, encoding: str, largest: int) -> Iterator[Record | BadLine]:
    """Yield each row as (line number, JSON object), or a BadLine for a row that does not fit the header."""
    csv.field_size_limit(largest)
    lines = _CsvLines(path, encoding, largest)
    reader = csv.reader(lines, strict=True)
    header = None
    while True:
        lines.begin_record()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise InputError(f"{path}, line {lines.start}: the header is not valid CSV ({error})") from None
            reason = f"not CSV ({error})"
            if lines.size > largest:  # the error of _CsvLines, a whole sentence
                reason = str(error)
            yield BadLine(path, lines.start, reason)
            continue
        if header is None:
            header = row or None  # an empty line before the header is skipped
            for name in row:
                if name and row.count(name) > 1:  # spreadsheets write empty columns
                    raise InputError(f"{path}, line {lines.start}: the header lists the column {name!r} more than once")
        elif len(row) == len(header):
            record = json.dumps(dict(zip(header, row, strict=True)), ensure_ascii=False)
            yield lines.start, record.encode("utf-8", "surrogateescape")
        elif row:  # not an empty line
            yield BadLine(path, lines.start, f"the row has {len(row)} fields, but the header has {len(header)}")


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"reading {path} needs the package pyarrow: {pip_install('pyarrow')}") from None
    return pyarrow


def _parquet_rows(path: str) -> Iterator[Record | BadLine]:
    """Yield the rows of a parquet file as JSON, with a BadLine for each row that contains invalid UTF-8.

    Only columns of text, or of lists or structs that contain text, are included (see `_is_readable`).
    """
    pyarrow = _pyarrow(path)
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [f.name for f in file.schema_arrow if _is_readable(pyarrow.types, f.type)]
            for batch in file.iter_batches(256, columns=columns):
                for row in _rows_of(batch):
                    number += 1
                    if isinstance(row, UnicodeDecodeError):
                        yield BadLine(path, number, f"the text is not UTF-8 ({decode_error_place(row)})")
                    else:
                        yield number, json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}, after row {number}: damaged parquet ({' '.join(str(error).split())[:200]})"
        ) from None


def _rows_of(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """Yield the rows of an Arrow batch, with an error in place of each row that contains invalid UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield error
            return
        for number in range(batch.num_rows):  # the error does not name its row
            yield from _rows_of(batch.slice(number, 1))


def _is_readable(types: Any, column: Any) -> bool:
    """Return True for an Arrow type that contains text and, besides text, only numbers, booleans and nulls."""
    plain_checks = (types.is_boolean, types.is_integer, types.is_floating, types.is_null)
    has_text = False
    for leaf in _leaf_types(types, column):
        if types.is_string(leaf) or types.is_large_string(leaf) or types.is_string_view(leaf):
            has_text = True
        elif not any(is_type(leaf) for is_type in plain_checks):
            return False
    return has_text


def _leaf_types(types: Any, column: Any) -> Iterator[Any]:
    """Yield the leaf types of nested lists, structs and dictionary-encoded columns."""
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    if types.is_struct(column):
        for field in column:
            yield from _leaf_types(types, field.type)
    elif types.is_dictionary(column) or any(is_type(column) for is_type in lists):
        yield from _leaf_types(types, column.value_type)
    else:
        yield column


def unread_columns_hint(path: str, keys: Sequence[str] | Callable[..., Any]) -> str:
    """Return a hint for the error of a record: it names the requested parquet columns that hold no text.

    Columns without text are not read. Returns "" for other file formats.
    """
    if format_suffix(path) != ".parquet":
        return ""
    unread = []
    for name, type_ in _unread_columns(path, os.stat(path).st_mtime_ns).items():
        if callable(keys) or name in keys:
            unread.append(f"{name} ({type_})")
    if not unread:
        return ""
    return f"; columns without text are not read: {', '.join(unread)}"


@lru_cache(maxsize=64)
def _unread_columns(path: str, changed: int) -> dict[str, str]:
    """Return name -> type of each column of a Parquet file that is not read. Raises InputError for a damaged file.

    changed: time of change, for the cache.
    """
    pyarrow = _pyarrow(path)
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged parquet ({' '.join(str(error).split())[:200]})") from None
    return {field.name: str(field.type) for field in schema if not _is_readable(pyarrow.types, field.type)}


_SEPARATORS = re.compile(r"[ \t\r\n,]*")
_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'\\.|["\n\[\]{},]', re.DOTALL)
_DEPTH_CHANGE = {"[": 1, "{": 1, "]": -1, "}": -1, ",": 0}
_DECODER = json.JSONDecoder()
_CUT_MARGIN = 16  # characters; a parse error this close to the window's end may only mean that an item is incomplete


class _JsonArray:
    """JSON array read through a window that moves over the file; each character is copied only a few times."""

    def __init__(self, path: str, encoding: str, largest: int) -> None:
        self._path = path
        self._largest = largest
        self._blocks = read_blocks(path, BLOCK, encoding)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        # window, position in the window, line number at this position
        self._window = ""
        self._position = 0
        self._line = 1

    def items(self) -> Iterator[Record | BadLine]:
        """Yield each element as (line number, JSON in one line), or a BadLine for an unreadable one."""
        self._skip_pattern(_SPACE)
        self._advance_to(self._position + 1)  # skip the bracket that is_array found
        while self._skip_pattern(_SEPARATORS):
            if self._window[self._position] == "]":
                self._advance_to(self._position + 1)
                if self._skip_pattern(_SPACE):
                    yield BadLine(self._path, self._line, "text after the end of the array is skipped")
                return
            end, error, may_continue = self._parse()

            # The item may be cut off at the end of the window, with an error or without: of 12345, the window may hold
            # 12. So add a block, and parse the item again, unless the part in the window is already longer than an item
            # may be (is_endless).
            is_endless = may_continue and len(self._window) - self._position > self._largest
            if may_continue and not is_endless and self._read_block():
                continue

            if error or end - self._position > self._largest:
                reason = f"the record is not JSON ({error})"
                if is_endless or not error:  # too long, whether its end is in the window or not
                    reason = overlong_message(self._largest, ".json")
                yield BadLine(self._path, self._line, reason)
                # For a broken item, the search for its end stops at the limit of valid items, so that it skips no more.
                # An endless item is already longer than this limit.
                self._skip_item(bounded=not is_endless)
                continue

            # JSON allows line breaks only between tokens, where a space is equivalent.
            raw = self._window[self._position : end].replace("\r", " ").replace("\n", " ")
            yield self._line, raw.encode("utf-8", "surrogateescape")
            self._advance_to(end)
        yield BadLine(self._path, self._line, "the array is not closed: a ] is missing")

    def _parse(self) -> tuple[int, str, bool]:
        """Parse the next item; return (end, error, may_continue).

        end: position after the item in the window, 0 after an error. error: what is wrong with the item, or "".
        may_continue: whether the item may continue in the next block.
        """
        try:
            _, end = _DECODER.raw_decode(self._window, self._position)
        except json.JSONDecodeError as error:
            may_continue = error.msg.startswith("Unterminated") or error.pos + _CUT_MARGIN > len(self._window)
            return 0, error.msg, may_continue
        except ValueError:  # Python refuses integers of more than 4300 digits
            return 0, "a number has more than 4300 digits", False
        except RecursionError:
            return 0, "nested too deeply", False
        return end, "", end == len(self._window)  # a number may continue in the next block

    def _advance_to(self, to: int) -> None:
        """Move the position in the window forward, and count the lines passed."""
        self._line += self._window.count("\n", self._position, to)
        self._position = to

    def _read_block(self) -> bool:
        """Append blocks to the window; return False at the end of the file."""
        rest = self._window[self._position :]
        # A long item is parsed from its beginning each time, so the window grows by a factor, not by a block.
        count = 1 + len(rest) // BLOCK
        blocks = list(islice(self._blocks, count))
        self._window = rest + "".join(map(self._decode, blocks))
        self._position = 0
        return bool(blocks)

    def _skip_pattern(self, pattern: re.Pattern[str]) -> bool:
        """Advance past a match of `pattern`; return False at the end of the file."""
        while True:
            match = pattern.match(self._window, self._position)
            if match:
                self._advance_to(match.end())
            if self._position < len(self._window):
                return True
            if not self._read_block():
                return False

    def _skip_item(self, bounded: bool) -> None:
        """Advance past an unreadable item: to its closing bracket or, if a quote is not closed, to the end of the line.

        bounded: stop the search after as many characters as the largest valid item may have.
        """
        scanner = _ItemScanner()
        num_scanned = 0
        while (end := scanner.end(self._window, self._position)) is None:
            # An odd backslash at the end is the first half of an escape, which the next block completes.
            num_backslashes = len(self._window) - len(self._window.rstrip("\\"))
            window_end = len(self._window) - num_backslashes % 2
            num_scanned += window_end - self._position
            self._advance_to(window_end)
            if (bounded and num_scanned > self._largest) or not self._read_block():
                end = len(self._window)
                break
        self._advance_to(end)


class _ItemScanner:
    """Search for the end of an array item that may extend over several windows."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._lines = 0

    def end(self, text: str, start: int) -> int | None:
        """Search `text` from `start`; return the position after the item, or None if it continues after `text`.

        In `{"a": [1]}, 2`, the depth is 1 2 1 0 after the brackets, so the item ends with the last one. An item without
        brackets ends at a comma or ] of depth 0, which belongs to the array.
        """
        for mark in _STRUCTURE.finditer(text, start):
            char = mark[0]
            if char == "\n":
                # JSON strings have no line breaks, so the closing quote is missing. In an item of several lines, the
                # search continues as if the quote were there, because brackets show where the item ends.
                if self._quoted and not self._lines:
                    return mark.start()
                self._quoted = False
                self._lines += 1
            elif char == '"':
                self._quoted = not self._quoted
            elif not self._quoted and char in _DEPTH_CHANGE:  # not a bracket in a string, nor an escape
                if self._depth == 0 and char in "],":
                    return mark.start()
                self._depth += _DEPTH_CHANGE[char]
                if self._depth <= 0 and char != ",":
                    return mark.end()
        return None

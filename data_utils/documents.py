"""Reading of text files as documents.

    .jsonl, .ndjson, .json  one JSON object per line; a .json file may also be one array of objects
    .csv, .parquet          one record per row; the header or the schema names the keys
    .txt                    plain text, with a blank line between documents

Files are plain or compressed (.gz, .bz2, .xz, .zst). Each file is cut into chunks of about a megabyte at document
boundaries. A chunk of an uncompressed UTF-8 text file is only a byte range, and a worker process reads this range.
Other files can only be read sequentially (streams.py, records.py), so their chunks carry the bytes themselves.
"""

import bisect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from .document_text import Take, parse
from .draws import Draw, uniform
from .files import Source, find_files, is_compressed, kind
from .records import is_array, records, too_long, unread_columns
from .streams import BadLine, InputError, blocks, is_utf8, looks_like

CHUNK_BYTES = 1 << 20
LARGEST_DOCUMENT = 1 << 23  # default size limit of a document in bytes; bounds a worker process's memory
SKIPPED_BYTES = 1 << 26  # an overlong document is skipped in steps of this many bytes

# A blank line may contain spaces, including U+3000 of Chinese text. A line may end with \n, \r\n or \r.
_SPACES = rb"(?:[ \t\x0b\x0c]|\xe3\x80\x80|\xc2\xa0|\xef\xbb\xbf)*"
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?:" + _SPACES + rb"(?>\r\n|\r|\n))+")
_LINE_END = re.compile(rb"\n")
_BLANK = re.compile(rb"(?:[\s]|\xe3\x80\x80|\xc2\xa0|\xef\xbb\xbf)*")


Bad = tuple[tuple[int, BadLine], ...]


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `start + length` of a file; for compressed files `start` counts decompressed bytes.

    content: these bytes if they cannot be read from the file by offset, else None.
    lines: line numbers of `content` in the file, counted from 1: the number of the first line, or a tuple with the
    number of every line. None: line numbers are found by counting the lines of the file when a message needs one.
    bad: documents found to be unreadable while the file was cut into chunks, as (offset in `content`, error).
    """

    source: Source
    start: int
    length: int
    content: bytes | None = None
    lines: int | tuple[int, ...] | None = None
    bad: Bad = ()

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.source.path

    def read(self) -> bytes:
        """Return the bytes of the chunk."""
        if self.content is not None:
            return self.content
        with open(self.path, "rb") as file:
            file.seek(self.start)
            content = file.read(self.length)
        if len(content) != self.length:
            raise _shrunk(self.path)
        return content

    def line_number(self, offset: int) -> int:
        """Return the number, from 1, of the line that contains byte `offset` of this chunk."""
        if self.lines is not None:
            before = self.read()[:offset].count(b"\n")
            return self.lines + before if isinstance(self.lines, int) else self.lines[before]
        return _line_number(self.path, self.start + offset)


def _shrunk(path: str) -> InputError:
    return InputError(f"{path} became shorter while it was read")


def _line_number(path: str, offset: int) -> int:
    changed = os.stat(path).st_mtime_ns
    full, rest = divmod(offset, CHUNK_BYTES)
    before = sum(_lines_of(path, changed, each) for each in range(full))
    return 1 + before + bisect.bisect_left(_line_ends(path, changed, full), rest)


# Line counts are cached. Otherwise, finding the line number of each bad document would read the file again.
@lru_cache(maxsize=1 << 16)
def _lines_of(path: str, changed: int, block: int) -> int:
    with open(path, "rb") as file:
        file.seek(block * CHUNK_BYTES)
        return file.read(CHUNK_BYTES).count(b"\n")


@lru_cache(maxsize=2)
def _line_ends(path: str, changed: int, block: int) -> list[int]:
    with open(path, "rb") as file:
        file.seek(block * CHUNK_BYTES)
        return [found.start() for found in _LINE_END.finditer(file.read(CHUNK_BYTES))]


def _delimiter(path: str) -> re.Pattern[bytes]:
    """Return the pattern of the delimiter between two documents: blank lines in .txt files, else a line break."""
    return _BLANK_LINE if kind(path) == ".txt" else _LINE_END


def _too_long(path: str, line: int, largest: int, hint: str = "") -> BadLine:
    delimiter = "a blank line" if kind(path) == ".txt" else "a line break"
    return BadLine(path, line, too_long(largest, delimiter) + hint)


def chunks(source: Source, size: int = CHUNK_BYTES, largest: int = LARGEST_DOCUMENT) -> Iterator[Chunk]:
    """Cut one file into chunks of about `size` bytes; no chunk contains a document of more than `largest` bytes.

    Raises InputError if the file as a whole cannot be read.
    """
    path = source.path
    holds = kind(path)
    of_records = holds in (".csv", ".parquet") or (holds == ".json" and is_array(path, source.encoding))
    if of_records:
        cut = _record_chunks
    elif is_compressed(path) or not is_utf8(source.encoding):
        cut = _stream_chunks
    else:
        cut = _plain_chunks
    yield from cut(source, size, largest)


def _plain_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Cut an uncompressed UTF-8 file into byte ranges that end at document boundaries."""
    path = source.path
    start = 0
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        while start < total:
            end = _next_boundary(file, path, start + size, total, largest)
            if end is not None:
                yield Chunk(source, start, end - start)
                start = end
                continue
            at = start + _last_boundary(file, path, start, size)
            if at > start:
                yield Chunk(source, start, at - start)
            file.seek(at)
            hint = looks_like(file.read(4096))
            bad: Bad = ((0, _too_long(path, _line_number(path, at), largest, hint)),)
            start += size
            while (end := _next_boundary(file, path, start, total, SKIPPED_BYTES)) is None:
                yield Chunk(source, at, SKIPPED_BYTES, b"\n", bad=bad)
                at = at + SKIPPED_BYTES
                bad = ()
                start = at
            yield Chunk(source, at, end - at, b"\n", bad=bad)
            start = end


def _next_boundary(file: BinaryIO, path: str, at_least: int, total: int, largest: int) -> int | None:
    """Return the offset at which the first delimiter after `at_least` ends, or `total` at the end of the file.

    Returns None if the `largest` bytes after `at_least` contain no delimiter.
    """
    delimiter = _delimiter(path)
    at = at_least
    carried = b""
    while at < total:
        file.seek(at)
        read = file.read(1 << 16)
        if not read:
            raise _shrunk(path)
        block = carried + read
        found = delimiter.search(block)
        if found:
            return at - len(carried) + found.end()
        at += len(read)
        carried = block[len(block.rstrip(b" \t\r\n\x0b\x0c\xe3\x80\xc2\xa0\xef\xbb\xbf")) :]
        if at - at_least > largest:
            return None
    return total


def _last_boundary(file: BinaryIO, path: str, start: int, size: int) -> int:
    """Return where the last delimiter in the `size` bytes after `start` ends, relative to `start`.

    Returns 0 if these bytes contain no delimiter.
    """
    file.seek(start)
    content = file.read(size + 4096)
    end = 0
    for found in _delimiter(path).finditer(content):
        if found.start() >= size:
            break
        end = found.end()
    return end


def _stream_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Cut a file that can only be read sequentially into chunks that carry their bytes."""
    delimiter = _delimiter(source.path)
    held = b""
    line = 1
    start = 0
    skipping = False
    for block in blocks(source.path, size, source.encoding):
        held += block
        ends = [found.end() for found in delimiter.finditer(held)]
        bad: Bad = ()
        cut = 0
        whole = bool(ends)  # whether the bytes before `cut` are whole documents
        if ends and skipping:
            cut = ends[0]
            skipping = False
            whole = False
        elif ends:
            cut = ends[-1]
        elif skipping or len(held) > largest:
            # Discard an overlong document except its final line breaks, which may be the first part of a delimiter.
            cut = len(held.rstrip(b" \t\r\n"))
            if not skipping:
                bad = ((0, _too_long(source.path, line, largest)),)
            skipping = True
        content = held[:cut]
        held = held[cut:]
        if content and whole:
            yield Chunk(source, start, cut, content, line)
        elif content:
            # The overlong document is left out, except a line for its error.
            yield Chunk(source, start, cut, b"\n" * len(bad), line, bad)
        line += content.count(b"\n")
        start += cut
    if held:
        last = b"" if skipping else held
        yield Chunk(source, start, len(held), last, line)


def _record_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Collect the records of a CSV, Parquet or JSON file into chunks, one record per line."""
    held: list[bytes] = []
    lines: list[int] = []
    bad: list[tuple[int, BadLine]] = []
    start = length = 0
    for record in records(source.path, kind(source.path), source.encoding, largest):
        if isinstance(record, BadLine):
            bad.append((length, record))
            line = record.line
            raw = b""
        else:
            line, raw = record
        held.append(raw)
        lines.append(line)
        length += len(raw) + 1
        if length >= size:
            yield _chunk_of(source, start, held, lines, bad)
            held = []
            lines = []
            bad = []
            start = start + length
            length = 0
    if held:
        yield _chunk_of(source, start, held, lines, bad)


def _chunk_of(
    source: Source, start: int, records: list[bytes], lines: list[int], bad: list[tuple[int, BadLine]]
) -> Chunk:
    content = b"".join(record + b"\n" for record in records)
    return Chunk(source, start, len(content), content, tuple(lines), tuple(bad))


def documents(
    chunk: Chunk,
    keys: Sequence[str] | Take = ("text",),
    seed: int = 0,
    largest: int = LARGEST_DOCUMENT,
    draw: Draw = uniform,
) -> Iterator[tuple[Any, ...] | BadLine]:
    """Yield a tuple of the texts under `keys` for each document of a chunk, or a BadLine if it is unreadable.

    keys: names of keys, or a function that converts a record to the tuple, and raises ValueError for an unsuitable
    record.
    seed, draw: seed and function of the random selection of documents from a file with a fractional weight.
    """
    content = chunk.read()
    bad = dict(chunk.bad)
    for start, end in _split_documents(_delimiter(chunk.path), content):
        if start in bad:
            yield bad[start]
            continue
        if end - start > largest:
            hint = looks_like(content[start : start + 4096])
            yield _too_long(chunk.path, chunk.line_number(start), largest, hint)
            continue
        raw = content[start:end]
        if _BLANK.fullmatch(raw):
            continue
        try:
            is_first = chunk.start + start == 0
            document = parse(raw, chunk.source, keys, is_first)
            for _ in range(_copies(chunk, start, seed, draw)):
                yield document
        except ValueError as error:
            yield BadLine(chunk.path, chunk.line_number(start), f"{error}{_unread(chunk.path, keys)}")


def _unread(path: str, keys: Sequence[str] | Take) -> str:
    """Return a hint for the error of a record: it names the requested parquet columns that hold no text.

    Columns without text are not read. Returns "" for other file formats.
    """
    if kind(path) != ".parquet":
        return ""
    found = []
    for name, type_ in unread_columns(path).items():
        if callable(keys) or name in keys:
            found.append(f"{name} ({type_})")
    if not found:
        return ""
    return f"; columns without text are not read: {', '.join(found)}"


def _split_documents(delimiter: re.Pattern[bytes], content: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    for found in delimiter.finditer(content):
        yield start, found.start()
        start = found.end()
    if start < len(content):
        yield start, len(content)


def _copies(chunk: Chunk, offset: int, seed: int, draw: Draw) -> int:
    whole = int(chunk.source.weight)
    rest = chunk.source.weight - whole
    return whole + (rest > 0 and draw(seed, chunk.source.number, chunk.start + offset) < rest)


def texts(
    inputs: Sequence[str] | Sequence[Source],
    key: str = "text",
    largest: int = LARGEST_DOCUMENT,
    on_bad: Callable[[BadLine], None] | None = None,
) -> Iterator[str]:
    """Yield all documents of all inputs in order, in this process.

    on_bad: called with each bad line. Without `on_bad`, the first bad line raises InputError.
    """
    sources = []
    names = []
    for each in inputs:
        if isinstance(each, Source):
            sources.append(each)
        else:
            names.append(each)
    if names:
        sources += find_files(names)
    for source in sources:
        for chunk in chunks(source, largest=largest):
            for document in documents(chunk, (key,), largest=largest):
                if not isinstance(document, BadLine):
                    yield document[0]
                elif on_bad:
                    on_bad(document)
                else:
                    raise InputError(str(document))

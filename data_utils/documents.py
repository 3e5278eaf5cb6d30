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
from functools import lru_cache, partial
from typing import Any, BinaryIO

from .document_text import ExtractTexts, parse_document
from .draws import uniform
from .files import Source, find_files, format_suffix, is_compressed
from .records import is_array, overlong_message, records, unread_columns_hint
from .streams import BadLine, InputError, encoding_hint, is_utf8, read_blocks

CHUNK_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 1 << 23  # default size limit of a document in bytes; bounds a worker process's memory
SKIPPED_BYTES = 1 << 26  # an overlong document is skipped in steps of this many bytes

# A blank line may contain spaces, including U+3000 of Chinese text. A line may end with \n, \r\n or \r.
_SPACES = rb"(?:[ \t\x0b\x0c]|\xe3\x80\x80|\xc2\xa0|\xef\xbb\xbf)*"
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?:" + _SPACES + rb"(?>\r\n|\r|\n))+")
_DELIMITER_BYTES = b" \t\r\n\x0b\x0c\xe3\x80\xc2\xa0\xef\xbb\xbf"  # all bytes that delimiters consist of
_LINE_END = re.compile(rb"\n")
_BLANK = re.compile(rb"(?:[\s]|\xe3\x80\x80|\xc2\xa0|\xef\xbb\xbf)*")


BadDocuments = tuple[tuple[int, BadLine], ...]


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `start + length` of a file; for compressed files `start` counts decompressed bytes.

    content: these bytes if they cannot be read from the file by offset, else None.
    lines: line numbers of `content` in the file, counted from 1: the number of the first line, or a tuple with the
    number of every line. None: line numbers are found by counting the lines of the file when a message needs one.
    bad: documents found to be unreadable while the file was cut into chunks, as (offset in `content`, error).
    changed: time of the last change of the file that was cut into chunks without `content`, in ns.
    """

    source: Source
    start: int
    length: int
    content: bytes | None = None
    lines: int | tuple[int, ...] | None = None
    bad: BadDocuments = ()
    changed: int = 0

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.source.path

    def read(self) -> bytes:
        """Return the bytes of the chunk."""
        if self.content is not None:
            return self.content
        with open(self.path, "rb") as file:
            changed = os.fstat(file.fileno()).st_mtime_ns
            file.seek(self.start)
            content = file.read(self.length)
        if changed != self.changed or len(content) != self.length:
            raise InputError(f"{self.path} was changed or replaced while it was read; start again")
        return content

    def line_number(self, offset: int) -> int:
        """Return the number, from 1, of the line that contains byte `offset` of this chunk."""
        if self.lines is not None:
            # Number of lines that end before the byte.
            before = self.read()[:offset].count(b"\n")
            return self.lines + before if isinstance(self.lines, int) else self.lines[before]
        return _line_number(self.path, self.start + offset)


def _line_number(path: str, offset: int) -> int:
    """Return the number, from 1, of the line with the byte at `offset`."""
    mtime_ns = os.stat(path).st_mtime_ns
    block, rest = divmod(offset, CHUNK_BYTES)
    # counts[i] is the number of lines that end before block i. The list is cached, so earlier calls may have counted
    # some blocks already; count on up to the block of the byte.
    counts = _line_counts(path, mtime_ns)
    with open(path, "rb") as file:
        file.seek((len(counts) - 1) * CHUNK_BYTES)
        while len(counts) <= block:
            counts.append(counts[-1] + file.read(CHUNK_BYTES).count(b"\n"))
    ends_in_block = bisect.bisect_left(_line_ends(path, mtime_ns, block), rest)  # lines that end in it before the byte
    return 1 + counts[block] + ends_in_block


# Line counts are cached. Otherwise, finding the line number of each bad document would read the file again.
@lru_cache(maxsize=64)
def _line_counts(path: str, mtime_ns: int) -> list[int]:
    """Return a list to which `_line_number` appends: item i is the number of lines that end before block i."""
    return [0]


@lru_cache(maxsize=2)
def _line_ends(path: str, mtime_ns: int, block: int) -> list[int]:
    with open(path, "rb") as file:
        file.seek(block * CHUNK_BYTES)
        return [match.start() for match in _LINE_END.finditer(file.read(CHUNK_BYTES))]


def _delimiter(path: str) -> re.Pattern[bytes]:
    """Return the pattern of the delimiter between two documents: blank lines in .txt files, else a line break."""
    return _BLANK_LINE if format_suffix(path) == ".txt" else _LINE_END


def _overlong_document(path: str, line: int, largest: int, hint: str = "") -> BadLine:
    return BadLine(path, line, overlong_message(largest, format_suffix(path)) + hint)


def chunks(source: Source, size: int = CHUNK_BYTES, largest: int = MAX_DOCUMENT_BYTES) -> Iterator[Chunk]:
    """Cut one file into chunks of about `size` bytes; no chunk contains a document of more than `largest` bytes.

    Raises InputError if the file as a whole cannot be read.
    """
    path = source.path
    suffix = format_suffix(path)
    has_records = suffix in (".csv", ".parquet") or (suffix == ".json" and is_array(path, source.encoding))
    if has_records:
        cut_file = _record_chunks
    elif is_compressed(path) or not is_utf8(source.encoding):
        cut_file = _stream_chunks
    else:
        cut_file = _plain_chunks
    yield from cut_file(source, size, largest)


def _plain_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Cut an uncompressed UTF-8 file into byte ranges that end at document boundaries."""
    path = source.path
    start = 0
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        new_chunk = partial(Chunk, source, changed=os.fstat(file.fileno()).st_mtime_ns)
        while start < total:
            end = _next_boundary(file, path, start + size, total, largest)
            if end is not None:
                yield new_chunk(start, end - start)
                start = end
                continue
            # The search found no end within `largest` bytes, so a document is overlong. It begins after the last
            # delimiter. The documents before it become a chunk of their own.
            overlong = start + _last_boundary(file, path, start, size)
            if overlong > start:
                yield new_chunk(start, overlong - start)

            # The overlong document becomes one or more chunks of an empty line, so that no process reads it as a whole.
            # Each but the last covers SKIPPED_BYTES without a delimiter. The first one has the error.
            file.seek(overlong)
            hint = encoding_hint(file.read(4096))
            bad: BadDocuments = ((0, _overlong_document(path, _line_number(path, overlong), largest, hint)),)
            search_from = start + size  # no document ends before
            start = overlong
            while (end := _next_boundary(file, path, search_from, total, SKIPPED_BYTES)) is None:
                yield Chunk(source, start, SKIPPED_BYTES, b"\n", bad=bad)
                bad = ()
                start += SKIPPED_BYTES
                search_from = start
            yield Chunk(source, start, end - start, b"\n", bad=bad)
            start = end


def _next_boundary(file: BinaryIO, path: str, at_least: int, total: int, largest: int) -> int | None:
    """Return the offset at which the first delimiter after `at_least` ends, or `total` at the end of the file.

    Returns None if the `largest` bytes after `at_least` contain no delimiter.
    """
    delimiter = _delimiter(path)
    offset = at_least
    carry = b""
    while offset < total:
        file.seek(offset)
        new_bytes = file.read(1 << 16)
        if not new_bytes:
            raise InputError(f"{path} became shorter while it was read")
        block = carry + new_bytes
        match = delimiter.search(block)
        if match:
            return offset - len(carry) + match.end()
        offset += len(new_bytes)
        # A delimiter may lie across two reads, so the white space at the end is searched again with the next bytes.
        carry = block[len(block.rstrip(_DELIMITER_BYTES)) :]
        if offset - at_least > largest:
            return None
    return total


def _last_boundary(file: BinaryIO, path: str, start: int, size: int) -> int:
    """Return where the last delimiter in the `size` bytes after `start` ends, relative to `start`.

    Returns 0 if these bytes contain no delimiter.
    """
    file.seek(start)
    # A delimiter that begins in the `size` bytes may end after them.
    content = file.read(size + 4096)
    end = 0
    for match in _delimiter(path).finditer(content):
        if match.start() >= size:
            break
        end = match.end()
    return end


def _stream_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Cut a file that can only be read sequentially into chunks that carry their bytes."""
    delimiter = _delimiter(source.path)
    unread = bytearray()  # bytes that no chunk has yet
    searched = 0  # the search for delimiters continues after this many bytes of `unread`
    line = 1
    start = 0
    skipping = False  # whether `unread` begins within an overlong document
    for block in read_blocks(source.path, size, source.encoding):
        unread += block
        ends = [match.end() for match in delimiter.finditer(unread, searched)]
        # White space at the end may be the first part of a delimiter, so it is searched again with the next block.
        searched += len(unread[searched:].rstrip(_DELIMITER_BYTES))
        # Each round cuts `cut` bytes off `unread`: whole documents, the end of an overlong document, or the part of an
        # overlong document that has been searched. It cuts nothing (0) if a document of allowed size has no end yet.
        bad: BadDocuments = ()
        cut = 0
        is_complete = bool(ends) and not skipping  # whether the bytes before `cut` are whole documents
        if ends and skipping:  # the overlong document ends; the next documents are cut in the next round
            cut = ends[0]
            searched = 0  # search the rest of `unread` again, as the other ends are not used
            skipping = False
        elif ends:
            cut = ends[-1]
        elif skipping or len(unread) > largest:
            cut = searched  # discard an overlong document except the white space at its end
            if not skipping:  # its first part gets the error
                bad = ((0, _overlong_document(source.path, line, largest)),)
            skipping = True
        content = bytes(unread[:cut])
        del unread[:cut]
        searched = max(0, searched - cut)
        if content:
            kept = content
            if not is_complete:
                # The overlong document is left out, except a line for its error.
                kept = b"\n" * len(bad)
            yield Chunk(source, start, cut, kept, line, bad)
        line += content.count(b"\n")
        start += cut
    if unread:
        last = b"" if skipping else bytes(unread)  # the end of an overlong document is left out
        yield Chunk(source, start, len(unread), last, line)


def _record_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    """Collect the records of a CSV, Parquet or JSON file into chunks, one record per line."""
    content = bytearray()
    lines: list[int] = []
    bad: list[tuple[int, BadLine]] = []
    start = 0

    def collected() -> Chunk:
        return Chunk(source, start, len(content), bytes(content), tuple(lines), tuple(bad))

    for record in records(source, largest):
        if isinstance(record, BadLine):
            bad.append((len(content), record))
            line = record.line
            raw = b""  # an empty line, at whose offset the error is found again
        else:
            line, raw = record
        content += raw + b"\n"
        lines.append(line)
        if len(content) >= size:
            yield collected()
            start += len(content)
            content = bytearray()
            lines = []
            bad = []
    if content:
        yield collected()


def documents(
    chunk: Chunk,
    keys: Sequence[str] | ExtractTexts = ("text",),
    seed: int = 0,
    largest: int = MAX_DOCUMENT_BYTES,
) -> Iterator[tuple[Any, ...] | BadLine]:
    """Yield a tuple of the texts under `keys` for each document of a chunk, or a BadLine if it is unreadable.

    keys: names of keys, or a function that converts a record to the tuple, and raises ValueError for an unsuitable
    record.
    seed: seed of the random selection of documents from a file with a fractional weight.
    """
    for document, copies in counted_documents(chunk, keys, seed, largest):
        for _ in range(copies):
            yield document


def counted_documents(
    chunk: Chunk, keys: Sequence[str] | ExtractTexts, seed: int, largest: int
) -> Iterator[tuple[tuple[Any, ...] | BadLine, int]]:
    """Yield each result of `documents` once, with the number of its copies, which the weight of the file implies."""
    content = chunk.read()
    bad = dict(chunk.bad)  # offset in `content` of a document -> error found when the file was cut into chunks
    # FILE@2.5 gives each document twice, and half of them once more.
    full_copies = int(chunk.source.weight)
    fraction = chunk.source.weight - full_copies
    for start, end in _document_ranges(_delimiter(chunk.path), content):
        if start in bad:
            yield bad[start], 1
            continue
        if end - start > largest:
            hint = encoding_hint(content[start : start + 4096])
            yield _overlong_document(chunk.path, chunk.line_number(start), largest, hint), 1
            continue
        raw = content[start:end]
        if _BLANK.fullmatch(raw):
            continue
        is_first = chunk.start + start == 0  # of the file; it may begin with a byte-order mark
        try:
            document = parse_document(raw, chunk.source, keys, is_first)
        except ValueError as error:
            reason = f"{error}{unread_columns_hint(chunk.path, keys)}"
            yield BadLine(chunk.path, chunk.line_number(start), reason), 1
            continue
        # The draw depends on the place in the file only, so any cut into chunks selects the same documents.
        is_drawn = fraction > 0 and uniform(seed, chunk.source.number, chunk.start + start) < fraction
        yield document, full_copies + is_drawn  # True counts as 1


def _document_ranges(delimiter: re.Pattern[bytes], content: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each document in `content`, without the delimiters."""
    start = 0
    for match in delimiter.finditer(content):
        yield start, match.start()
        start = match.end()
    if start < len(content):
        yield start, len(content)


def read_texts(
    inputs: Sequence[str],
    key: str = "text",
    largest: int = MAX_DOCUMENT_BYTES,
    on_bad: Callable[[BadLine], None] | None = None,
    seed: int = 0,
    encoding: str = "utf-8",
) -> Iterator[str]:
    """Yield all documents of all inputs in order, in this process.

    on_bad: called with each bad line. Without `on_bad`, the first bad line raises InputError.
    seed: seed of the documents that FILE@0.5 uses. inputs, encoding: see `find_files`.
    """
    for source in find_files(inputs, encoding):
        for chunk in chunks(source, largest=largest):
            for document in documents(chunk, (key,), seed, largest):
                if not isinstance(document, BadLine):
                    yield document[0]
                elif on_bad:
                    on_bad(document)
                else:
                    raise InputError(str(document))

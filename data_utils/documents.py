"""Text files as documents.

    .jsonl, .json   a JSON object a line; a .json may also be one array of objects
    .csv            a header, then a record a row
    .txt            plain text, a blank line between documents

plain or compressed (.gz, .xz, .zst). A file is cut into chunks of about a megabyte that end where a
document ends. A chunk of a plain file is only a place in it, so that worker processes read their
own; other files can be read from the front alone (streams.py), so their chunks carry their bytes.
"""

import glob
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from .streams import COMPRESSED, InputError, blocks, is_array, records

CHUNK_BYTES = 1 << 20
LARGEST_DOCUMENT = 1 << 23  # bytes; memory is bounded by it
SUFFIXES = (".jsonl", ".json", ".txt", ".csv")
KINDS = f"{', '.join(SUFFIXES)} (plain, {', '.join(COMPRESSED)})"


class Source(NamedTuple):
    """A file, how often each of its documents is taken (0.5: every second one at random), and its place among all."""

    path: str
    weight: float = 1.0
    number: int = 0


class BadLine(NamedTuple):
    """A document that could not be read: where, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `start + length` of a file; `content` holds them where they cannot be read from there.

    lines: number, from 1, of the first line of `content`, or of each of its lines; None where it
    must be counted when needed. Of compressed files `start` counts decompressed bytes.
    """

    source: Source
    start: int
    length: int
    content: bytes | None = None
    lines: int | tuple[int, ...] | None = None

    @property
    def path(self) -> str:
        return self.source.path

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def line_number(self, offset: int) -> int:
        """Number, from 1, of the line that byte `offset` of this chunk lies in."""
        if self.lines is not None:
            before = self.read()[:offset].count(b"\n")
            return self.lines + before if isinstance(self.lines, int) else self.lines[before]
        lines = 1
        with open(self.path, "rb") as file:
            left = self.start + offset
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def find_files(inputs: Sequence[str]) -> list[Source]:
    """The text files that `inputs` name, in a fixed order.

    An input is a file, a folder (searched through) or a glob pattern, and may end with `@WEIGHT`.
    Raises InputError for what does not exist, cannot be read, or is of an unknown kind.
    """
    files: list[Source] = []
    for given in inputs:
        name, weight = _weight(given)
        path = Path(name)
        if path.is_dir():
            found = sorted(str(p) for p in path.rglob("*") if p.is_file() and kind(str(p)))
            if not found:
                raise InputError(f"the folder {name} holds no file of {KINDS}")
        elif glob.has_magic(name) and not path.exists():
            found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p) and kind(p))
            if not found:
                raise InputError(f"no file of {KINDS} matches {name}")
        else:
            found = [name]
        for each in found:
            _check_file(each)
            files.append(Source(each, weight, len(files)))
    return files


def _weight(given: str) -> tuple[str, float]:
    name, at, weight = given.rpartition("@")
    if not at or os.path.exists(given):
        return given, 1.0
    try:
        value = float(weight)
    except ValueError:
        return given, 1.0
    if not 0 < value < 1e6:
        raise InputError(f"the weight in {given} must be a positive number")
    return name, value


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}")
    if not kind(path):
        raise InputError(f"{path} is none of {KINDS}")
    if not os.access(path, os.R_OK):
        raise InputError(f"cannot read {path}: no permission")


def is_compressed(path: str) -> bool:
    return path.endswith(COMPRESSED)


def kind(path: str) -> str | None:
    """The suffix that says what a file holds, e.g. `.jsonl` for x.jsonl.gz."""
    stem = os.path.splitext(path)[0] if is_compressed(path) else path
    return next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)


def _delimiter(path: str) -> bytes:
    return b"\n\n" if kind(path) == ".txt" else b"\n"


def chunks(source: Source, size: int = CHUNK_BYTES, largest: int = LARGEST_DOCUMENT) -> Iterator[Chunk]:
    """Cut one file into chunks of about `size` bytes. Raises InputError for a document of more than `largest`."""
    path = source.path
    if kind(path) == ".csv" or (kind(path) == ".json" and is_array(path)):
        yield from _record_chunks(source, size, largest)
        return
    if is_compressed(path):
        yield from _stream_chunks(source, size, largest)
        return
    total, start = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while start < total:
            end = _next_cut(file, path, start + size, total, largest)
            yield Chunk(source, start, end - start)
            start = end


def _next_cut(file: BinaryIO, path: str, at_least: int, total: int, largest: int) -> int:
    """The first place from `at_least` on where a document ends."""
    delimiter, at = _delimiter(path), at_least
    carried = b""
    while at < total:
        file.seek(at)
        block = carried + file.read(1 << 16)
        found = block.find(delimiter)
        if found >= 0:
            return at - len(carried) + found + len(delimiter)
        at += len(block) - len(carried)
        carried = block[-1:] if len(delimiter) > 1 else b""
        _check_size(path, at - at_least, largest)
    return total


def _check_size(path: str, size: int, largest: int) -> None:
    if size > largest:
        ends = "a blank line" if kind(path) == ".txt" else "a line break"
        raise InputError(f"{path} has a document of more than {largest} bytes; documents end with {ends}")


def _stream_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    delimiter, held, line, start = _delimiter(source.path), b"", 1, 0
    for block in blocks(source.path, size):
        held += block
        cut = held.rfind(delimiter)
        if cut < 0:
            _check_size(source.path, len(held), largest)
            continue
        content, held = held[: cut + len(delimiter)], held[cut + len(delimiter) :]
        yield Chunk(source, start, len(content), content, line)
        line += content.count(b"\n")
        start += len(content)
    if held:
        yield Chunk(source, start, len(held), held, line)


def _record_chunks(source: Source, size: int, largest: int) -> Iterator[Chunk]:
    held: list[bytes] = []
    lines: list[int] = []
    start = length = 0
    for line, record in records(source.path, kind(source.path) == ".csv", largest):
        raw = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")
        held.append(raw)
        lines.append(line)
        length += len(raw) + 1
        if length >= size:
            yield Chunk(source, start, length, b"\n".join(held), tuple(lines))
            held, lines, start, length = [], [], start + length, 0
    if held:
        yield Chunk(source, start, length, b"\n".join(held), tuple(lines))


def documents(chunk: Chunk, keys: Sequence[str] = ("text",), seed: int = 0) -> Iterator[tuple[str, ...] | BadLine]:
    """The texts under `keys` of each document of a chunk, in order; what cannot be read comes as a BadLine in its place.

    seed: decides which documents of a source of broken weight are taken; a pure function of the place in the file.
    """
    content = chunk.read()
    delimiter, start = _delimiter(chunk.path), 0
    while start < len(content):
        end = content.find(delimiter, start)
        end = len(content) if end < 0 else end
        raw = content[start:end]
        if raw.strip():
            try:
                document = _parse(raw, chunk.path, keys)
                for _ in range(_copies(chunk, start, seed)):
                    yield document
            except ValueError as error:
                yield BadLine(chunk.path, chunk.line_number(start), str(error))
        start = end + len(delimiter)


def _copies(chunk: Chunk, offset: int, seed: int) -> int:
    whole = int(chunk.source.weight)
    rest = chunk.source.weight - whole
    if not rest:
        return whole
    place = f"{seed}/{chunk.source.number}/{chunk.start + offset}".encode()
    return whole + (zlib.crc32(place) < rest * 2**32)


def _parse(raw: bytes, path: str, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} is 0x{raw[error.start]:02x})") from None
    if kind(path) == ".txt":
        return (text.strip("\n").removeprefix("\ufeff"),) * len(keys)
    try:
        record = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON that anybody writes (nested too deep)") from None
    found = []
    for key in keys:
        value = record.get(key) if isinstance(record, dict) else None
        if not isinstance(value, str):
            raise ValueError(f"no text under the key {key!r}")
        if "\\u" in text or "\\U" in text:
            _check_pairs(value)
        found.append(value)
    return tuple(found)


def _check_pairs(value: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which no Unicode text has") from None


def texts(inputs: Sequence[str], key: str = "text") -> Iterator[str]:
    """All documents of all inputs in order, in this process. Raises InputError at the first bad line."""
    for source in find_files(inputs):
        for chunk in chunks(source):
            for document in documents(chunk, (key,)):
                if isinstance(document, BadLine):
                    raise InputError(str(document))
                yield document[0]

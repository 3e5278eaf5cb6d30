"""Text files as documents: JSON lines (.jsonl, .json) or plain text (.txt, a blank line between documents), plain or .gz.

A file is cut into chunks of about a megabyte that end where a document ends. A chunk of a plain
file is only a place in it, so that worker processes read their own; a compressed file can be
read from the front alone, so its chunks carry their bytes.
"""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 1 << 20
LARGEST_DOCUMENT = 1 << 28
SUFFIXES = (".jsonl", ".json", ".txt")


class InputError(ValueError):
    """An input file cannot be read as documents; the message names file and line."""


class BadLine(NamedTuple):
    """A document that could not be read: where, and why."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Bytes `start` to `start + length` of a file; `content` holds them where the file is compressed.

    first_line: number of its first line, from 1; None where it must be counted when needed.
    """

    path: str
    start: int
    length: int
    content: bytes | None = None
    first_line: int | None = None

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        with open(self.path, "rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def line_number(self, offset: int) -> int:
        """Number, from 1, of the line that byte `offset` of this chunk lies in."""
        if self.first_line is not None:
            return self.first_line + self.read()[:offset].count(b"\n")
        lines = 1
        with open(self.path, "rb") as file:
            left = self.start + offset
            while left and (block := file.read(min(left, CHUNK_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def find_files(inputs: Sequence[str]) -> list[str]:
    """The text files that `inputs` name, directories searched through, in a fixed order.

    Raises InputError for what does not exist, cannot be read, or is of an unknown kind.
    """
    files: list[str] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = sorted(str(p) for p in path.rglob("*") if p.is_file() and _kind(str(p)))
            if not found:
                raise InputError(f"the folder {given} holds no .jsonl, .json or .txt file, plain or .gz")
            files += found
        elif not path.is_file():
            raise InputError(f"there is no file {given}")
        elif not _kind(given):
            raise InputError(f"{given} is neither .jsonl, .json nor .txt, plain or .gz")
        elif not os.access(path, os.R_OK):
            raise InputError(f"cannot read {given}: no permission")
        else:
            files.append(given)
    return files


def _kind(path: str) -> str | None:
    stem = path.removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)


def _delimiter(path: str) -> bytes:
    return b"\n\n" if _kind(path) == ".txt" else b"\n"


def chunks(path: str, size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut one file into chunks of about `size` bytes. Raises InputError for a document without end."""
    if path.endswith(".gz"):
        yield from _compressed_chunks(path, size)
        return
    total, start = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while start < total:
            end = _next_cut(file, path, start + size, total)
            yield Chunk(path, start, end - start)
            start = end


def _next_cut(file: BinaryIO, path: str, at_least: int, total: int) -> int:
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
        _check_size(path, at - at_least)
    return total


def _check_size(path: str, size: int) -> None:
    if size > LARGEST_DOCUMENT:
        ends = "a blank line" if _kind(path) == ".txt" else "a line break"
        raise InputError(f"{path} has a document of more than {LARGEST_DOCUMENT} bytes; documents end with {ends}")


def _compressed_chunks(path: str, size: int) -> Iterator[Chunk]:
    delimiter, held, line = _delimiter(path), b"", 1
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(size):
                held += block
                cut = held.rfind(delimiter)
                if cut < 0:
                    _check_size(path, len(held))
                    continue
                content, held = held[: cut + len(delimiter)], held[cut + len(delimiter) :]
                yield Chunk(path, 0, len(content), content, line)
                line += content.count(b"\n")
    except (OSError, EOFError) as error:
        raise InputError(f"{path}, line {line + held.count(bytes([10]))}: damaged gzip data ({error})") from None
    if held:
        yield Chunk(path, 0, len(held), held, line)


def documents(chunk: Chunk, key: str = "text") -> Iterator[str | BadLine]:
    """The documents of a chunk in order; what cannot be read comes as a BadLine in its place."""
    content = chunk.read()
    delimiter, start = _delimiter(chunk.path), 0
    while start < len(content):
        end = content.find(delimiter, start)
        end = len(content) if end < 0 else end
        raw = content[start:end]
        if raw.strip():
            try:
                yield _parse(raw, chunk.path, key)
            except ValueError as error:
                yield BadLine(chunk.path, chunk.line_number(start), str(error))
        start = end + len(delimiter)


def _parse(raw: bytes, path: str, key: str) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} is 0x{raw[error.start]:02x})") from None
    if _kind(path) == ".txt":
        return text.strip("\n").removeprefix("\ufeff")
    try:
        record = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise ValueError(f"no text under the key {key!r}")
    value: str = record[key]
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which no Unicode text has") from None
    return value


def texts(inputs: Sequence[str], key: str = "text") -> Iterator[str]:
    """All documents of all inputs in order, in this process. Raises InputError at the first bad line."""
    for path in find_files(inputs):
        for chunk in chunks(path):
            for document in documents(chunk, key):
                if isinstance(document, BadLine):
                    raise InputError(str(document))
                yield document

"""Files that are read from the front alone: compressed ones, CSV, and JSON arrays."""

import codecs
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

COMPRESSED = (".gz", ".xz", ".zst")


class InputError(ValueError):
    """An input file cannot be read as documents; the message names file and line."""


class _Zst(io.RawIOBase):
    """A .zst file, decompressed; unlike zstandard's own reader it notices a file that is cut short."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise InputError(f"{path} needs the package zstandard: pip install zstandard") from None
        self._new: Callable[[], Any] = zstandard.ZstdDecompressor().decompressobj
        self._file = open(path, "rb")  # noqa: SIM115  # closed in close()
        self._frame: Any = None
        self._held = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            raw = self._file.read(1 << 14)
            if not raw:
                if self._frame is not None:
                    raise EOFError("it ends in the middle")
                return 0
            while raw:
                frame = self._frame or self._new()
                self._held += frame.decompress(raw)
                raw, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zst(path: str) -> BinaryIO:
    return io.BufferedReader(_Zst(path), 1 << 20)


_OPEN: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zst}


def open_bytes(path: str) -> BinaryIO:
    """The file, decompressed as its name says."""
    for ending, opener in _OPEN.items():
        if path.endswith(ending):
            return opener(path)  # type: ignore[no-any-return]
    return open(path, "rb")


def blocks(path: str, size: int) -> Iterator[bytes]:
    """The content in pieces of at most `size` bytes. Raises InputError for damaged data, naming the line."""
    line = 1
    try:
        with open_bytes(path) as file:
            while block := file.read(size):
                yield block
                line += block.count(b"\n")
    except InputError:
        raise
    except _damage() as error:
        raise InputError(f"{path}, near line {line}: damaged compressed data ({error})") from None


def _damage() -> tuple[type[Exception], ...]:
    """What the decompressors raise."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return (OSError, EOFError, lzma.LZMAError, zlib.error)
    return (OSError, EOFError, lzma.LZMAError, zlib.error, ZstdError)


def is_array(path: str) -> bool:
    """Whether a .json file holds one array, not an object a line."""
    head = next(blocks(path, 4096), b"")
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def records(path: str, is_csv: bool, largest: int) -> Iterator[tuple[int, Any]]:
    """(number of the line it begins on, record) of a CSV file or a JSON array. Raises InputError."""
    yield from _rows(path, largest) if is_csv else _items(path, largest)


def _rows(path: str, largest: int) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(largest)
    try:
        with open_bytes(path) as binary:
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            reader = csv.DictReader(file, strict=True)
            line = 2
            for row in reader:
                yield line, row
                line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not CSV ({error})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, after line {reader.line_num}: not UTF-8 ({error.reason})") from None
    except _damage() as error:
        raise InputError(f"{path}: damaged compressed data ({error})") from None


def _items(path: str, largest: int) -> Iterator[tuple[int, Any]]:
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    parse = json.JSONDecoder().raw_decode
    held, line, opened = "", 1, False
    source = blocks(path, 1 << 20)
    while True:
        stripped = held.lstrip(" \t\r\n," if opened else " \t\r\n")
        line += held[: len(held) - len(stripped)].count("\n")
        held = stripped
        if not opened and held[:1] == "[":
            held, opened = held[1:], True
            continue
        if opened and held[:1] == "]":
            return
        try:
            if not held:
                raise json.JSONDecodeError("nothing more", held, 0)
            item, end = parse(held)
            if end == len(held):  # a number might go on in what was not read yet
                raise json.JSONDecodeError("at the end", held, end)
        except json.JSONDecodeError as error:
            block = next(source, None)
            if block is None or len(held) > largest:
                raise InputError(f"{path}, line {line}: not a JSON array ({error.msg})") from None
            try:
                held += decode(block)
            except UnicodeDecodeError:
                raise InputError(f"{path}, after line {line}: not UTF-8") from None
            continue
        yield line, item
        line += held[:end].count("\n")
        held = held[end:]

"""Input files as byte streams: decompressed according to the file suffix, and converted to UTF-8."""

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from megatron.packages import pip_install

from .quality import common_characters

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAX_BYTES = 1 << 20  # maximum number of decompressed bytes in memory per file
XZ_MEMORY_LIMIT = 1 << 30  # memory limit of the .xz decompressor in bytes; an .xz header may request a huge dictionary


class InputError(ValueError):
    """Error for an input file that cannot be read as documents; the message names file and line."""


class BadLine(NamedTuple):
    """Unreadable document: its file, its line (for parquet its row) and the reason."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        place = "row" if self.path.lower().endswith(".parquet") else "line"
        return f"{self.path}, {place} {self.line}: {self.reason}"


class _PieceReader(io.RawIOBase):
    """Read-only file object over a generator of byte pieces."""

    def __init__(self, pieces: Any) -> None:
        self._pieces = pieces
        self._buffer = memoryview(b"")  # the rest of the current piece

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with bytes, and return their number; 0 at the end of the pieces."""
        while not self._buffer:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._buffer = memoryview(piece)
        count = min(len(buffer), len(self._buffer))
        buffer[:count] = self._buffer[:count]
        self._buffer = self._buffer[count:]
        return count

    def close(self) -> None:
        self._pieces.close()
        super().close()


def _decompress(path: str, new: Callable[[], Any], padding: bytes = b"", read_size: int = 1 << 14) -> Iterator[bytes]:
    """Yield the content of a compressed file of one or more streams, at most `MAX_BYTES` at once.

    Unlike the standard readers, it raises for truncated or invalid data, EOFError for a truncated stream.
    new: function that returns a decompressor for one stream, with the interface of `bz2.BZ2Decompressor`.
    padding: bytes that may occur between streams. read_size: number of compressed bytes per read.
    """
    decompressor: Any = None
    unused = b""  # bytes read after the end of a stream, with which the next stream begins
    with open(path, "rb") as file:
        while raw := unused or file.read(read_size):
            unused = b""
            if decompressor is None:
                # A new stream begins after the padding; the read may have been padding alone.
                raw = raw.lstrip(padding)
                if not raw:
                    continue
                decompressor = new()
            yield decompressor.decompress(raw, MAX_BYTES)
            # The rest of the output stays in the decompressor, which then needs no input.
            while not decompressor.eof and not decompressor.needs_input:
                yield decompressor.decompress(b"", MAX_BYTES)
            if decompressor.eof:
                unused = decompressor.unused_data
                decompressor = None
    if decompressor is not None:
        raise EOFError("it is truncated")


class _ZstdAdapter:
    """Adapter that gives a decompressor of zstandard the interface of `bz2.BZ2Decompressor`.

    zstandard cannot limit the output of one call, but a call with 256 bytes of input outputs at most 8 MB.
    """

    needs_input = True

    def __init__(self, decompressor: Any) -> None:
        self._decompressor = decompressor

    def decompress(self, raw: bytes, most: int) -> bytes:
        return bytes(self._decompressor.decompress(raw))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decompressor, name)  # `eof` and `unused_data`


def _open_zstd(path: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise InputError(f"reading {path} needs the package zstandard: {pip_install('zstandard')}") from None
    # The default would refuse the windows of `zstd --long=31`. Memory is allocated only for the window of the file.
    zstd = zstandard.ZstdDecompressor(max_window_size=2**31)
    return _decompress(path, lambda: _ZstdAdapter(zstd.decompressobj()), read_size=1 << 8)


_OPENERS: dict[str, Callable[[str], Iterator[bytes]]] = {
    ".bz2": lambda path: _decompress(path, bz2.BZ2Decompressor),
    ".xz": lambda path: _decompress(path, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_LIMIT), b"\0"),
    ".zst": _open_zstd,
}


def open_bytes(path: str) -> BinaryIO:
    """Open a file for reading, decompressed according to its suffix."""
    ending = os.path.splitext(path)[1].lower()
    if ending == ".gz":
        return gzip.open(path)  # type: ignore[return-value]
    if ending in _OPENERS:
        return io.BufferedReader(_PieceReader(_OPENERS[ending](path)), 1 << 20)
    return open(path, "rb")


def is_utf8(encoding: str) -> bool:
    """Return True if `encoding` is UTF-8. Raises InputError for an encoding that Python does not know."""
    try:
        "".encode(encoding)  # also raises for codecs that do not encode text, such as hex and zip
    except LookupError:
        raise InputError(
            f"--encoding {encoding!r} is not an encoding that Python knows; use, for example, gb18030, utf-16 or auto"
        ) from None
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def read_blocks(path: str, size: int, encoding: str) -> Iterator[bytes]:
    """Yield a file's content as UTF-8 in blocks of about `size` bytes; invalid input becomes the byte 0xff.

    This byte never occurs in UTF-8.
    Raises InputError for damaged compressed data, for a file in UTF-8 or ASCII although `encoding` is another
    encoding, and for a file that its decoder refuses as a whole, such as UTF-16 without a byte-order mark.
    """
    pieces = _raw_blocks(path, size)
    if is_utf8(encoding):
        yield from pieces
        return
    # Invalid input becomes the lone surrogate U+DCFF, which surrogateescape encodes as the byte 0xff.
    codecs.register_error("mark", lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]
    decoder = codecs.getincrementaldecoder(encoding)("mark")
    is_first = True
    for piece in pieces:
        if is_first and (actual := _actual_encoding(piece, encoding)):
            raise InputError(f"{path} is {actual}, not {encoding}; read it separately, without --encoding")
        is_first = False
        try:
            text = decoder.decode(piece)
        except UnicodeError as error:
            hint = encoding_hint(piece[:4096]) or "; read it separately, with its own --encoding"
            raise InputError(f"{path} is not {encoding} ({error}){hint}") from None
        yield text.encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", True).encode("utf-8", "surrogateescape")


def _raw_blocks(path: str, size: int) -> Iterator[bytes]:
    """Yield a file's decompressed bytes. Raises InputError, naming a nearby line, for damaged data."""
    line = 1
    try:
        with open_bytes(path) as file:
            while block := file.read(size):
                yield block
                line += block.count(b"\n")
    except (InputError, FileNotFoundError):
        raise
    except _damage_errors() as error:
        raise InputError(f"{path}, near line {line}: cannot read or decompress the file ({error})") from None


def _damage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that decompressors raise for damaged data."""
    errors = (OSError, EOFError, lzma.LZMAError, zlib.error)
    try:
        from zstandard import ZstdError
    except ImportError:
        return errors
    return (*errors, ZstdError)


# Smallest size in bytes of a file that is considered ASCII. Chinese text in UTF-16 may consist of ASCII bytes by
# chance; for 8 characters (16 bytes), this happens in one of 100,000 cases.
MIN_ASCII_BYTES = 16


def _actual_encoding(head: bytes, encoding: str) -> str:
    """Return "UTF-8" or "ASCII" if a file's first bytes have this encoding instead of `encoding`, else ""."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be incomplete
    except UnicodeDecodeError:
        return ""
    if not text.isascii():
        return "UTF-8"
    # In an encoding that contains ASCII, such as gb18030, ASCII text is valid.
    if len(head) < MIN_ASCII_BYTES or "a".encode(encoding) == b"a":
        return ""
    # isprintable() is False for tabs and line breaks, so remove these.
    printable = text.translate({ord(char): None for char in "\t\r\n"}).isprintable()
    return "ASCII" if printable else ""


def detect_encoding(path: str) -> str:
    """Return the encoding of a text file, judged by its first megabyte: UTF-8 unless another one is plausible."""
    return _likely_encoding(next(_raw_blocks(path, 2**20), b"")) or "utf-8"


def decode_error_place(error: UnicodeDecodeError) -> str:
    """Return the place of the first byte that is not UTF-8, for a message."""
    return f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"


def encoding_hint(raw: bytes) -> str:
    """Return the hint `; it looks like ...` if the bytes are plausible in an encoding other than UTF-8, else ""."""
    encoding = _likely_encoding(raw)
    return f"; it looks like {encoding}: try --encoding {encoding}, or auto" if encoding else ""


def _likely_encoding(raw: bytes) -> str:
    """Return the encoding other than UTF-8 in which the bytes are plausible text, "" if there is none."""
    if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if raw.count(0) * 5 > len(raw):
        # Latin letters have a zero byte: "a" is 61 00 in utf-16-le and 00 61 in utf-16-be.
        is_little_endian = raw[1::2].count(0) > raw[::2].count(0)
        return "utf-16-le" if is_little_endian else "utf-16-be"
    # Text that is mostly valid UTF-8 gets no hint, although its bytes may also decode in other encodings by chance.
    # The last character may be incomplete, and an incremental decoder leaves it out.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    non_ascii = [char for char in text if char > "\x7f"]
    is_mostly_utf8 = not non_ascii or non_ascii.count("\ufffd") * 4 < len(non_ascii)
    if is_mostly_utf8:
        return ""
    for name in ("gb18030", "utf-16-le", "utf-16-be"):
        if _is_chinese(raw, name):
            return name
    return ""


# Ideographs, the wide space and the punctuation marks U+3001 and U+3002, and full-width forms such as a wide comma.
_CHINESE = re.compile("[\u4e00-\u9fa5\u3000-\u3002\uff01-\uff5f]")
_HANGUL = re.compile("[\uac00-\ud7a3]")
_KANA = re.compile("[\u3041-\u30ff]")
_PRINTABLE_ASCII = re.compile(r"[ -~\t\r\n]")


def _is_chinese(raw: bytes, encoding: str) -> bool:
    """Return True if over nine of ten characters are typical of Chinese text and at least one is Chinese.

    Japanese and Korean files decode to Chinese characters, too, but to rare ones. So do accented letters in files of
    Western European languages, mostly to characters that GB2312 lacks.
    """
    text = raw.decode(encoding, "replace")
    chinese = "".join(_CHINESE.findall(text))
    num_chinese = len(chinese)
    num_ascii = len(_PRINTABLE_ASCII.findall(text))
    bytes_in_gb2312 = len(chinese.encode("gb2312", "ignore"))  # two for each of its characters
    if num_ascii > num_chinese and bytes_in_gb2312 < 1.5 * num_chinese:
        return False
    if common_characters(text) < 0.03 * num_chinese and _is_korean_or_japanese(raw):
        return False
    return num_chinese > 0 and (num_chinese + num_ascii) * 10 > 9 * len(text)


def _is_korean_or_japanese(raw: bytes) -> bool:
    """Return True if the bytes are mostly Hangul in EUC-KR, or to a third kana in Shift-JIS."""
    for encoding, script, least_share in (("euc_kr", _HANGUL, 0.9), ("shift_jis", _KANA, 0.3)):
        text = raw.decode(encoding, "replace")
        non_ascii = sum(char > "\x7f" for char in text)
        if len(script.findall(text)) > least_share * non_ascii:
            return True
    return False


def open_text(path: str, encoding: str) -> io.TextIOWrapper:
    """Open a file as text with unchanged line ends; invalid bytes become lone surrogates."""
    joined = io.BufferedReader(_PieceReader(read_blocks(path, 1 << 20, encoding)), 1 << 20)
    return io.TextIOWrapper(joined, encoding="utf-8-sig", errors="surrogateescape", newline="")

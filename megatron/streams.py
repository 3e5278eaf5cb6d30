"""Wrappers for standard output and standard error, and the limit of open files.

A stream may fail while the run or tool must continue: the reader may go away (`| head`, a closed ssh session), the disk
may be full, or the stream may be closed from the start.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from .atomic import name_in_errors

NAMES = {"stdout": "standard output", "stderr": "standard error"}
OPEN_FILES = 1 << 16


class _Wrapper:
    """Base of streams that replace `_stream`, whose other attributes they have."""

    _stream: TextIO

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class GuardedStream(_Wrapper):
    """A stream that raises nothing: its first failure is reported on the other standard stream.

    consequence: how the report ends, i.e. what the failure means for the user.
    """

    def __init__(self, name: str, stream: TextIO | None, consequence: str) -> None:
        self._name = name
        self._consequence = consequence
        self._has_failed = False
        self._was_closed = stream is None
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the process

    def write(self, text: str) -> int:
        """Write `text`; drop it if the stream fails."""
        try:
            self._stream.write(text)
        # An ASCII locale such as LANG=C cannot encode every character. Write an escape such as \u4f60 in its place.
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._report(error)
            return len(text)
        if text.strip():  # the stream works again, so its next failure is reported
            self._has_failed = False
        return len(text)

    def flush(self) -> None:
        """Flush the stream; drop the buffered text if the stream fails."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._report(error)

    def report_closed(self) -> None:
        """Report the stream if it was already closed when the process started."""
        if self._was_closed:
            self._report(ValueError("closed"))

    def _report(self, error: OSError | ValueError) -> None:
        if self._has_failed:
            return  # only the first failure is reported
        self._has_failed = True
        # The ValueError of a closed stream has no `strerror`.
        reason = getattr(error, "strerror", None) or "it is closed"
        note = f"note: {NAMES[self._name]} cannot be written ({reason}); {self._consequence}"
        other = sys.stderr if self._name == "stdout" else sys.stdout
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(note, file=other, flush=True)


class NamedStdout(_Wrapper):
    """Wrapper of standard output, for tools that print a result. An OSError names standard output as its file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`. Raises OSError."""
        with name_in_errors(NAMES["stdout"]):
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream. Raises OSError."""
        with name_in_errors(NAMES["stdout"]):
            self._stream.flush()


def open_closed_streams() -> None:
    """Open the null device for closed standard streams; otherwise a file opened later would get their descriptors."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The system returns the lowest free descriptor, which is the closed one.
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)


def raise_open_files() -> None:
    """Raise the soft limit of open files to OPEN_FILES, or to the hard limit if that is lower.

    A corpus keeps two files open, but most systems allow 1,024. Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:  # -1 is no limit
        new_limit = min(OPEN_FILES, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


@contextlib.contextmanager
def guard_streams(consequence: str, *names: str) -> Iterator[None]:
    """Replace the streams `names` ("stdout", "stderr") by `GuardedStream` ones inside the context."""
    streams = {name: getattr(sys, name) for name in names}
    if any(isinstance(stream, GuardedStream) for stream in streams.values()):  # a caller guards them already
        yield
        return
    open_closed_streams()
    for name, stream in streams.items():
        setattr(sys, name, GuardedStream(name, stream, consequence))
    # Only when all are replaced: the report on one stream is written to the other, which may be closed, too.
    for name in names:
        getattr(sys, name).report_closed()
    try:
        yield
    finally:
        for name, stream in streams.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)

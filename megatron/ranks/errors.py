"""Errors that end a run alike on all ranks, each described in one sentence, and the exit of the process."""

import contextlib
import multiprocessing
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

from ..config.fields import describe

_MEGATRON = Path(__file__).resolve().parent.parent
_OURS = (f"{_MEGATRON}{os.sep}", f"{_MEGATRON.parent / 'tds'}{os.sep}")
_LIBRARIES = (*{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}, "<")


class RunError(RuntimeError):
    """A failure on some rank, raised alike on all ranks."""


def complaint(error: BaseException) -> str:
    """Describe an error in one line; if it comes from user code, add the file, line and function."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OURS):
            break
        if not frame.filename.startswith(_LIBRARIES) and "site-packages" not in frame.filename:
            return f"{describe(error)} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return describe(error)


def exit_now(code: int) -> NoReturn:
    """Flush the standard streams, kill worker processes and end the process at once.

    It skips Python's shutdown, during which a gloo thread that frees a tensor aborts the process in about one exit
    of thirty.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may be closed, or its reader gone
            stream.flush()
    os._exit(code)

"""Errors that end a run on all ranks, their one-line description, and the exit of the process."""

import contextlib
import multiprocessing
import os
import re
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from tds.messages import words_of

from ..config.fields import describe
from .source import of_library

_MEGATRON = Path(__file__).resolve().parent.parent
_OURS = (f"{_MEGATRON}{os.sep}", f"{_MEGATRON.parent / 'tds'}{os.sep}")


# Error that torch's DataLoader has received from a data worker, before its message.
_REPORTED = re.compile(r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback.*\n[\w.]*\1: ", re.DOTALL)


class RunError(RuntimeError):
    """A failure on at least one rank; the same error is raised on all ranks."""


def complaint(error: BaseException) -> str:
    """Describe an error in one line; if it comes from user code, add the file, line and function."""
    words = words_of(error)
    reported = _REPORTED.search(words)
    if reported:
        return " ".join(words[reported.end() :].split())
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OURS):
            break
        if not of_library(frame.filename):
            return f"{describe(error)} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return describe(error)


def describe_rendezvous_error(error: Exception) -> str:
    """Describe in one sentence why the ranks could not connect to each other."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text:
        return f"port {os.environ.get('MASTER_PORT')} is in use by another process: give another one (MASTER_PORT)"
    if "waiting for clients" in text or "timed out" in text.lower():
        return (
            f"the {os.environ.get('WORLD_SIZE')} ranks did not all meet at {where} ({text[:120]}): start the missing "
            "ones, with the same MASTER_ADDR and MASTER_PORT (--startup-timeout-minutes sets how long to wait)"
        )
    return f"the ranks could not meet at {where}: {text[:200]}"


def exit_now(code: int) -> NoReturn:
    """Flush the standard streams, kill worker processes and end the process at once.

    This skips Python's shutdown. In about one of thirty shutdowns, a gloo thread frees a tensor, which aborts the
    process.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        # The stream may be None or closed, or the process that reads it may have ended.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)

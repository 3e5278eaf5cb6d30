"""Errors that end a run on all ranks, their one-line description, and the exit of the process."""

import os
import re
import traceback
from pathlib import Path
from typing import NoReturn

from tds.messages import error_text, flush_and_exit

from ..config.messages import describe_error
from ..data.workers import kill_workers
from .source import is_library_file

_MEGATRON = Path(__file__).resolve().parent.parent
_OWN_FOLDERS = (f"{_MEGATRON}{os.sep}", f"{_MEGATRON.parent / 'tds'}{os.sep}")


# Error that torch's DataLoader has received from a data worker, before its message.
_WORKER_ERROR = re.compile(
    r"Caught (\w+) in DataLoader worker process \d+\.\nOriginal Traceback.*\n[\w.]*\1: ", re.DOTALL
)


class RunError(RuntimeError):
    """A failure on at least one rank; the same error is raised on all ranks."""


def one_line_error(error: BaseException) -> str:
    """Describe an error in one line; if it comes from user code, add the file, line and function."""
    text = error_text(error)
    worker_error = _WORKER_ERROR.search(text)
    if worker_error:
        return " ".join(text[worker_error.end() :].split())  # the worker's message, its line breaks made spaces
    # Of the frames from the innermost one on, the first outside the libraries decides whose code raised the error.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OWN_FOLDERS):
            break
        if not is_library_file(frame.filename):
            return f"{describe_error(error)} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return describe_error(error)


def describe_rendezvous_error(error: Exception) -> str:
    """Describe in one sentence why the ranks could not connect to each other."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text:
        return f"port {os.environ.get('MASTER_PORT')} is in use by another process: give another one (MASTER_PORT)"
    if "waiting for clients" in text or "timed out" in text.lower():
        return (
            f"the {os.environ.get('WORLD_SIZE')} ranks did not all meet at {address} ({text[:120]}): start the missing "
            "ones, with the same MASTER_ADDR and MASTER_PORT (--startup-timeout-minutes sets how long to wait)"
        )
    return f"the ranks could not meet at {address}: {text[:200]}"


def exit_now(code: int) -> NoReturn:
    """Flush the standard streams, kill worker processes and end the process at once.

    This skips Python's shutdown. In about one of thirty shutdowns, a gloo thread frees a tensor, which aborts the
    process.
    """
    kill_workers()
    flush_and_exit(code)

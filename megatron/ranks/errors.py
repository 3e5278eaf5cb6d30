"""Errors that end a run on all ranks alike, in one sentence, and the way out."""

import contextlib
import multiprocessing
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ..config.fields import describe

T = TypeVar("T")

_MEGATRON = Path(__file__).resolve().parent.parent
_OURS = (f"{_MEGATRON}{os.sep}", f"{_MEGATRON.parent / 'tds'}{os.sep}")
_LIBRARIES = (*{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}, "<")


class RunError(RuntimeError):
    """Something went wrong on some rank; raised alike on all of them."""


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any, raise on all, so that nobody waits for the dead.

    `action` makes no collective that a rank could miss by failing before it.
    Raises RunError with the message of the lowest rank that failed, for errors in what a user
    gave (ValueError, OSError); other exceptions are bugs and pass through.
    """
    problem, result = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = complaint(error)
    problems: list[Any] = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise RunError(text if rank == 0 else f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def complaint(error: BaseException) -> str:
    """An error in one line; if a user's own code raised it, not we, with the place."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OURS):
            break
        if not frame.filename.startswith(_LIBRARIES) and "site-packages" not in frame.filename:
            return f"{describe(error)} ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return describe(error)


def exit_now(code: int) -> NoReturn:
    """End the process at once.

    While Python shuts down, a thread of gloo's that lets go of a tensor aborts the process
    (about one exit in thirty), so nothing of the shut-down is left to do: files are closed here.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # its reader may be gone, and it may be closed
            stream.flush()
    os._exit(code)

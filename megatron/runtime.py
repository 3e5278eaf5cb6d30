"""What an entry script may ask for anywhere: the settings, the tokenizer, the timers, a line on rank 0.

Only entry scripts ask; the packages below are handed what they need.
"""

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
from tqdm import tqdm

from .arguments import Args
from .config import Config
from .metrics import Timers
from .options import describe
from .tokenizer import Tokenizer

T = TypeVar("T")

_HERE = Path(__file__).resolve().parent
_OURS = (f"{_HERE}{os.sep}", f"{_HERE.parent / 'tds'}{os.sep}")
_LIBRARIES = (*{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}, "<")


class RunError(RuntimeError):
    """Something went wrong on some rank; raised alike on all of them."""


class _Current:
    args: Args | None = None
    tokenizer: Tokenizer | None = None
    timers: Timers | None = None


def start(config: Config, tokenizer: Tokenizer | None, timers: Timers) -> None:
    """Make these the ones that `get_args()` and its kin answer with."""
    _Current.args, _Current.tokenizer, _Current.timers = Args(config), tokenizer, timers


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise RuntimeError(f"no {what} yet: pretrain() sets it up before it calls your functions")
    return value


def get_args() -> Args:
    """The settings of this run, flat and read-only: `args.hidden_size`."""
    return _known(_Current.args, "settings")


def get_tokenizer() -> Tokenizer:
    return _known(_Current.tokenizer, "tokenizer")


def get_timers() -> Timers:
    return _known(_Current.timers, "timers")


def is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def print_rank_0(message: str) -> None:
    """One line on rank 0, above the progress bar if there is one."""
    if is_rank_0():
        tqdm.write(message)


def together(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it fails on any, raise on all, so that nobody waits for the dead.

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


def leave(code: int) -> NoReturn:
    """End the process at once.

    While Python shuts down, a thread of gloo's that lets go of a tensor aborts the process
    (about one exit in thirty), so nothing of the shut-down is left to do: files are closed here.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)

"""Messages to the user: printing that never raises an error, and advice that names flags or ds_config keys."""

import contextlib
import os
import sys
from typing import NoReturn

setting_advice = {  # advice in error messages, worded for a ds_config; a program with its own flags replaces it
    "overlap": '"overlap_grad_reduce": false in the pipeline section of the ds_config',
    "no ZeRO": '"zero_optimization": {"stage": 0} in the ds_config',
    "no pipeline": "a plain module instead of the PipelineModule",
    "ranks": "torchrun --nproc-per-node",
    "startup timeout": "timeout= of init_distributed()",
}


def error_text(error: BaseException) -> str:
    """Return the message of an error; a user's class may have a `__str__` that raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"(no message, because str() of the error raised {type(broken).__name__})"


def shortened(text: str, most: int) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    head = 3 * most // 4
    tail = most - head
    return f"{text[:head]} ... ({len(text) - most} characters left out) ... {text[-tail:]}"


def flush_and_exit(code: int) -> NoReturn:
    """Flush the standard streams and end the process at once, without destructors of C++, which may fail at the end."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be None or closed, or the process that reads it may have ended.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def say(text: str, error: bool = False) -> None:
    """Print `text` on standard output, or standard error; ignore a closed stream or a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)


def exit_with_error(text: str) -> NoReturn:
    """Print `text` on standard error and end the process at once with code 1."""
    say(text, error=True)
    flush_and_exit(1)

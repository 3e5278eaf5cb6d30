"""Printing that must never end the run."""

import contextlib
import sys


def say(text: str, error: bool = False) -> None:
    """Print `text` on standard output, or standard error; ignore a closed stream or a full disk."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)

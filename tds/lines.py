"""Lines for people, which must never end the work."""

import contextlib
import sys


def say(text: str, error: bool = False) -> None:
    """Print `text` on standard output, or standard error; if that is closed or its disk is full, lose it."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr if error else sys.stdout, flush=True)

"""Limits on the time and memory of chat templates, because a downloaded template is untrusted code."""

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SECONDS = 10.0
MOST_BITS = 1 << 16
MOST_ITEMS = 1 << 26  # largest number of characters in a string or elements in a list
BOUNDED = frozenset(("**", "*", "+", "%"))  # operators checked by `refuse_large`; never folded by the compiler


class EndlessTemplate(ValueError):
    """Error for a template that takes longer, or creates larger values, than any conversation needs."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise EndlessTemplate if the enclosed code runs for more than `SECONDS`; no limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise EndlessTemplate(f"the chat template runs for more than {SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)


def refuse_large(operator: str, left: Any, right: Any) -> None:
    """Raise EndlessTemplate if an operation's result would be huge.

    The time limit does not suffice, because a timer cannot interrupt an operation that runs in C.
    """
    if operator == "%" and isinstance(left, str) and re.search(r"\d{6}|%[^a-zA-Z%]*\*", left):
        raise EndlessTemplate(f"the chat template uses the format {left[:40]!r}, whose result has no length limit")
    bits = max((value.bit_length() for value in (left, right) if isinstance(value, int)), default=0)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if abs(left) > 1 else 0
    if bits > MOST_BITS:
        raise EndlessTemplate(f"the chat template computes a number of {bits} bits, which is too large")
    sizes = [len(value) for value in (left, right) if isinstance(value, (str, list, tuple, bytes))]
    counts = [value for value in (left, right) if isinstance(value, int)]
    items = sizes[0] * counts[0] if operator == "*" and sizes and counts else sum(sizes)
    if items > MOST_ITEMS:
        raise EndlessTemplate(f"the chat template creates a string or list of {items} elements, which is too long")

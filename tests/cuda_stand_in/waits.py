"""Counts of the operations for which the host waits for its device, with the lines of code that call them."""

import collections
import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent


class Waits:
    """Counter of the waits in each training step of this rank.

    steps: for each step, the number of waits by operation and place.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._of_step: collections.Counter[str] | None = None

    def add(self, operation: str) -> None:
        """Count a wait, if a training step is running."""
        if self._of_step is not None:
            self._of_step[f"{operation} at {caller()}"] += 1

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the waits of a training step, which runs in this block."""
        self._of_step = collections.Counter()
        try:
            yield
        finally:
            self.steps.append(dict(self._of_step))
            self._of_step = None


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> str:
    """Return the innermost line of this project in the stack, and that of DeepSpeed if it is nearer."""
    own = deepspeed = None
    for frame in traceback.extract_stack():
        path = Path(frame.filename)
        if HERE in path.parents or frame.lineno is None:
            continue
        if "deepspeed" in path.parts:
            start = path.parts.index("deepspeed")
            deepspeed = Place("/".join(path.parts[start:]), frame.lineno)
        elif ROOT in path.parents and "site-packages" not in path.parts:
            own = Place(path.relative_to(ROOT).as_posix(), frame.lineno)
            deepspeed = None
    if own is None:
        return str(deepspeed or "autograd")  # autograd's device thread has no Python frames of the caller
    return f"{own} ({deepspeed})" if deepspeed else str(own)


def is_in_deepspeed(wait: str) -> bool:
    """Return whether a key of `Waits.steps` is a wait in DeepSpeed's code."""
    return "deepspeed/" in wait


WAITS = Waits()

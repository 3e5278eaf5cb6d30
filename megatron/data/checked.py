"""Pairs of files that another process has checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_checked: ContextVar[dict[str, bool] | None] = ContextVar("checked", default=None)


@contextmanager
def checked_once(found: dict[str, bool]) -> Iterator[None]:
    """In this context, `IndexedDataset` checks only pairs that `found` lacks, and then adds them to `found`.

    The check of a large index is slow. So one process can make the check, and other processes reuse the result.
    found: prefix of a pair -> True if every document of the pair is one sequence.
    """
    token = _checked.set(found)
    try:
        yield
    finally:
        _checked.reset(token)


def checked_pairs() -> dict[str, bool] | None:
    """Return the `found` of the innermost `checked_once`; None outside."""
    return _checked.get()

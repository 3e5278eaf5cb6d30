"""Pairs of files that another process has checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_reused_results: ContextVar[dict[str, bool]] = ContextVar("checked")


@contextmanager
def reuse_checks(results: dict[str, bool]) -> Iterator[None]:
    """In this context, `IndexedDataset` checks only pairs that `results` lacks, and then adds them to `results`.

    The check of a large index is slow. So one process can make the check, and other processes reuse the result.
    results: prefix of a pair -> True if every document of the pair is one sequence.
    """
    token = _reused_results.set(results)
    try:
        yield
    finally:
        _reused_results.reset(token)


def reused_checks() -> dict[str, bool]:
    """Return the `results` of the innermost `reuse_checks`; outside, a new dict."""
    return _reused_results.get({})

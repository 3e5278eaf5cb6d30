"""Failures of a save: the same error on all ranks, and no trace of the failed checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron.config.fields import describe
from megatron.ranks.agreement import all_ranks
from megatron.ranks.errors import RunError
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import is_rank_0

from .leftovers import discard


class SaveError(RunError):
    """A checkpoint could not be written because of the disk; a later attempt may succeed."""


@contextlib.contextmanager
def discard_on_failure(temporary: Path) -> Iterator[None]:
    """Delete the temporary folder and raise an error on all ranks if the `with` block fails on any rank.

    Raises SaveError if all failures are OSErrors (such as a full disk), else RunError.
    """
    grave = False
    try:
        with all_ranks():
            try:
                yield
            except ValueError as error:
                grave = not isinstance(error.__cause__, OSError)
                raise
    except RunError as error:
        kind = RunError if any(gather_objects(grave)) else SaveError
        if is_rank_0():
            discard(temporary)
        raise kind(f"could not save {temporary.with_suffix('')}: {error}; earlier checkpoints are unchanged") from None


def as_user_error(error: Exception) -> Exception:
    """Return `error` if it is an OSError or ValueError, which `all_ranks` handles, else a ValueError that names it."""
    if isinstance(error, (OSError, ValueError)):
        return error
    name = type(error).__name__
    return ValueError(f"{name} {describe(error)}" if str(error) else name)

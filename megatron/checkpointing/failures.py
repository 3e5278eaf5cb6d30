"""Failures of a save: the same error on all ranks, and no trace of the failed checkpoint."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron.config.messages import describe_error
from megatron.ranks.agreement import raise_on_all_ranks
from megatron.ranks.errors import RunError
from megatron.ranks.objects import gather_objects
from megatron.ranks.rank_0 import is_rank_0

from .leftovers import discard_checkpoint


class SaveError(RunError):
    """A checkpoint could not be written because of the disk; a later attempt may succeed."""


@contextlib.contextmanager
def discard_on_failure(temporary: Path) -> Iterator[None]:
    """Delete the temporary folder and raise an error on all ranks if the `with` block fails on any rank.

    Raises SaveError if all failures are OSErrors (such as a full disk), else RunError.
    """
    is_fatal = False  # whether this rank has failed for another reason than an OSError; the RunError does not say
    try:
        # If any rank fails with an OSError or a ValueError, `raise_on_all_ranks` raises a RunError on all ranks.
        with raise_on_all_ranks():
            try:
                yield
            except ValueError as error:
                # An OSError may have caused it, such as that of a CheckpointError; then a later save may succeed.
                is_fatal = not isinstance(error.__cause__, OSError)
                raise
    except RunError as error:
        # All ranks must raise the same type.
        error_type = RunError if any(gather_objects(is_fatal)) else SaveError
        if is_rank_0():
            discard_checkpoint(temporary)
        # The message names the final path: without the ending .tmp.
        raise error_type(
            f"could not save {temporary.with_suffix('')}: {error}; earlier checkpoints are unchanged"
        ) from None


def as_user_error(error: Exception) -> Exception:
    """Return `error` if it is an OSError or ValueError, which `raise_on_all_ranks` handles; else wrap its message.

    The ValueError that is then returned names the type of `error`.
    """
    if isinstance(error, (OSError, ValueError)):
        return error
    name = type(error).__name__
    return ValueError(f"{name} {describe_error(error)}" if str(error) else name)

"""Reading of checkpoints beside a run that deletes its old checkpoints (--keep-last)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
from ..storage import RemotePath
from .files import INDEX, CheckpointError
from .lookup import find_checkpoint

T = TypeVar("T")
WAS_DELETED = "was deleted while it was read, as a run with --keep-last does"


class DeletedError(CheckpointError):
    """A checkpoint was deleted while it was read; the message names it."""


def was_deleted(checkpoint: Path) -> bool:
    """Return whether a run has deleted a checkpoint. In object storage, it deletes the index first."""
    return not ((checkpoint / INDEX).is_file() if isinstance(checkpoint, RemotePath) else checkpoint.is_dir())


def read_with_retry(
    find_paths: Callable[[], Sequence[Path]], read: Callable[[Sequence[Path]], T], may_retry: bool = True
) -> T:
    """Return `read(find_paths())`. If a checkpoint is deleted meanwhile, find and read the checkpoints once more.

    may_retry: False if `read` cannot be repeated. Raises DeletedError instead of the error of a file that is not there.
    """
    paths = find_paths()
    try:
        return read(paths)
    except (CheckpointError, OSError):
        deleted = next(filter(was_deleted, paths), None)  # the first deleted checkpoint
        if deleted is None:  # the error has another cause
            raise
    if not may_retry:
        raise DeletedError(f"{deleted} {WAS_DELETED}; run the command again, or raise --keep-last of the run")
    print_rank_0(f"note: {deleted} {WAS_DELETED}; the newest checkpoint is read instead")
    try:
        paths = find_paths()
    except CheckpointError:  # for example, --load names the deleted checkpoint itself
        raise DeletedError(
            f"{deleted} {WAS_DELETED}; give a run directory or a checkpoint that the run keeps"
        ) from None
    # Read the paths that have just been found. If one of them is deleted, too, this raises DeletedError.
    return read_with_retry(lambda: paths, read, may_retry=False)


def read_newest(load: str, read: Callable[[Path], T], may_retry: bool = True) -> T:
    """Return `read` of the checkpoint that --load names; see `read_with_retry`."""
    return read_with_retry(lambda: [find_checkpoint(load)], lambda paths: read(paths[0]), may_retry)


@contextmanager
def explain_if_deleted(checkpoint: Path | None) -> Iterator[None]:
    """Context of a start from a checkpoint: if it fails because the checkpoint was deleted, the RunError says so.

    A start is not repeated automatically: the model, data and optimizer were set up for this checkpoint.
    """
    try:
        yield
    except RunError:
        if checkpoint is None or not was_deleted(checkpoint):
            raise
        raise RunError(
            f"{checkpoint} {WAS_DELETED}; run the command again, or raise --keep-last of the other run"
        ) from None

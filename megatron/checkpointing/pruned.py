"""Reading of checkpoints beside a run that deletes its old checkpoints (--keep-last)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..ranks.errors import RunError
from ..ranks.rank_0 import print_rank_0
from ..storage import RemotePath
from .files import INDEX, CheckpointError, find_checkpoint

T = TypeVar("T")
WHY = "was deleted while it was read, as a run with --keep-last does"


class DeletedError(CheckpointError):
    """A checkpoint was deleted while it was read; the message names it."""


def was_deleted(checkpoint: Path) -> bool:
    """Return whether a run has deleted a checkpoint. In object storage, it deletes the index first."""
    return not ((checkpoint / INDEX).is_file() if isinstance(checkpoint, RemotePath) else checkpoint.is_dir())


def read_kept(find: Callable[[], Sequence[Path]], read: Callable[[Sequence[Path]], T], again: bool = True) -> T:
    """Return `read(find())`. If a checkpoint is deleted meanwhile, find and read the checkpoints once more.

    again: False if `read` cannot be repeated. Raises DeletedError instead of the error of a file that is not there.
    """
    paths = find()
    try:
        return read(paths)
    except (CheckpointError, OSError):
        gone = next(filter(was_deleted, paths), None)
        if gone is None:
            raise
    if not again:
        raise DeletedError(f"{gone} {WHY}; run the command again, or raise --keep-last of the run")
    print_rank_0(f"note: {gone} {WHY}; the newest checkpoint is read instead")
    try:
        paths = find()
    except CheckpointError:
        raise DeletedError(f"{gone} {WHY}; give a run directory or a checkpoint that the run keeps") from None
    return read_kept(lambda: paths, read, again=False)


def read_newest(load: str, read: Callable[[Path], T], again: bool = True) -> T:
    """Return `read` of the checkpoint that --load names; see `read_kept`."""
    return read_kept(lambda: [find_checkpoint(load)], lambda paths: read(paths[0]), again)


@contextmanager
def say_if_deleted(checkpoint: Path | None) -> Iterator[None]:
    """Context of a start from a checkpoint: if it fails because the checkpoint was deleted, the RunError says so.

    A start is not repeated automatically: the model, data and optimizer were set up for this checkpoint.
    """
    try:
        yield
    except RunError:
        if checkpoint is None or not was_deleted(checkpoint):
            raise
        raise RunError(f"{checkpoint} {WHY}; run the command again, or raise --keep-last of the other run") from None

"""Clean-up after a crash or a failed save: half-written checkpoints, and an earlier save under a temporary name."""

import contextlib
import shutil
from pathlib import Path

from ..atomic import remove
from ..storage import RemotePath
from .checksums import SHA256
from .files import INDEX, aside, latest_name, point_latest_to, sums_file

PROBE = ".shared-"  # begin of the name of a file by which the nodes test whether they share a folder


def discard(checkpoint: Path) -> None:
    """Delete a half-written checkpoint as far as possible; errors are ignored.

    In object storage, it has its final name. So it is kept if it is complete, as after an error in make_room.
    """
    if not isinstance(checkpoint, RemotePath):
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    from .remote import delete

    with contextlib.suppress(OSError):
        if not (checkpoint / INDEX).is_file():
            delete(checkpoint, INDEX)


def recover(folder: Path) -> None:
    """Undo what a crash has left when it interrupted another save of the iteration that `latest` names.

    It has left the earlier save under a temporary name (.old.tmp). If the new save is complete, `latest` has the
    checksum of the earlier one.
    """
    if isinstance(folder, RemotePath):  # there, nothing is renamed
        return
    name = latest_name(folder) if folder.is_dir() else None
    if name is None:
        return
    final = folder / name
    old = aside(final)
    if not old.is_dir():
        return
    if not final.exists():
        old.rename(final)
    elif sums_file(old).is_file() and SHA256.of(sums_file(old)) in (folder / "latest").read_text("utf-8", "replace"):
        point_latest_to(final)


def clear(folder: Path) -> None:
    """Delete the half-written checkpoints and small files that a crash has left; a file of such a name is renamed."""
    if isinstance(folder, RemotePath):
        from .remote import delete_incomplete

        delete_incomplete(folder, INDEX)
        return
    for left in [*folder.glob("iter_*.tmp"), *folder.glob(f"{PROBE}*"), folder / "latest.tmp"]:
        with contextlib.suppress(OSError):  # if the folder cannot be written, the first save reports it
            is_file = left.is_file() and not left.is_symlink()
            if is_file and left.name.startswith("iter_"):  # a save writes folders of such names only
                from .foreign import keep_foreign

                keep_foreign(left)
            else:
                remove(left)

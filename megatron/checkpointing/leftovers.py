"""Clean-up after a crash or a failed save: half-written checkpoints, and an earlier save under a temporary name."""

import contextlib
import shutil
from pathlib import Path

from ..atomic import remove
from ..storage import RemotePath
from .checksums import SHA256
from .files import INDEX, old_save_path, point_latest_to, sums_file
from .lookup import latest_name

PROBE_PREFIX = ".shared-"  # begin of the name of a file by which the nodes test whether they share a folder


def discard_checkpoint(checkpoint: Path) -> None:
    """Delete a half-written checkpoint as far as possible; errors are ignored.

    In object storage, it has its final name. So it is kept if it is complete, as after an error in make_room.
    """
    if not isinstance(checkpoint, RemotePath):
        shutil.rmtree(checkpoint, ignore_errors=True)
        return
    from .remote import delete_checkpoint

    with contextlib.suppress(OSError):
        if not (checkpoint / INDEX).is_file():
            delete_checkpoint(checkpoint)


def restore_replaced(folder: Path) -> None:
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
    old_save = old_save_path(final)
    if not old_save.is_dir():  # no save of this iteration was being replaced
        return
    if not final.exists():  # the crash came before the new save got its name, so the earlier one gets it back
        old_save.rename(final)
        return
    # The new save is complete. If `latest` still has the checksum of the earlier one, the crash came before the update.
    old_sums = sums_file(old_save)
    if old_sums.is_file() and SHA256.hash_file(old_sums) in (folder / "latest").read_text("utf-8", "replace"):
        point_latest_to(final)


def delete_leftovers(folder: Path) -> None:
    """Delete the half-written checkpoints and small files that a crash has left; rename what no save has written."""
    if isinstance(folder, RemotePath):
        # Uploads that were killed have left checkpoints without an index.
        for path in folder.glob("iter_*"):
            discard_checkpoint(path)  # if the folder cannot be written, the first save reports it
        return
    for leftover in [*folder.glob("iter_*.tmp"), *folder.glob(f"{PROBE_PREFIX}*"), folder / "latest.tmp"]:
        with contextlib.suppress(OSError):  # if the folder cannot be written, the first save reports it
            if leftover.is_symlink() or not leftover.name.startswith("iter_"):  # a link, a probe or latest.tmp
                remove(leftover)
                continue
            from .foreign import delete_own_files, keep_foreign

            if leftover.is_file():  # no save has written it: a save writes only folders of such names
                keep_foreign(leftover)
            else:  # of a half-written checkpoint, delete what a save has written, and rename the folder for the rest
                delete_own_files(leftover)

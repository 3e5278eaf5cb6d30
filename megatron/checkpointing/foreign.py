"""Files and folders in the folder of checkpoints that no save has written: they are kept."""

import os
from pathlib import Path

from ..ranks.rank_0 import print_rank_0
from ..storage import RemotePath
from .checksums import ALGORITHMS
from .files import INDEX, TENSORS

OWN_NAMES = (INDEX, *(each.sums_name for each in ALGORITHMS), "certificate.json")  # the last one by earlier versions


def is_own(name: str) -> bool:
    """Return whether a file of this name in the folder of a checkpoint was written by a save."""
    # A crash leaves a file such as checkpoint.json.4711-0a1b2c3d.tmp.
    is_half_written = name.startswith(OWN_NAMES) and name.endswith(".tmp")
    return name in OWN_NAMES or name.endswith(TENSORS) or is_half_written


def is_foreign(path: Path) -> bool:
    """Return whether no save has written what is at `path`, which has the name of a checkpoint.

    That is a link, a file, or a folder with files of which none is a checkpoint's.
    """
    is_link = not isinstance(path, RemotePath) and path.is_symlink()  # object storage has no links
    if is_link or path.is_file():
        return True
    names = [each.name for each in path.glob("*")]
    # An empty folder holds nothing to keep.
    return bool(names) and not any(map(is_own, names))


def keep_foreign(path: Path) -> None:
    """Rename what is in the place of a checkpoint, unless a save has written it, and print a note."""
    if not is_foreign(path):
        return
    kind = "a link" if path.is_symlink() else "no checkpoint"
    new_path = _rename_to_kept(path, path.name)
    print_rank_0(f"note: {path} was {kind}, but a new checkpoint needs its name; it was renamed to {new_path.name}")


def delete_own_files(folder: Path) -> None:
    """Delete the files that saves have written into `folder`, and the folder if nothing else is in it.

    Otherwise, the folder is renamed, with a note. Raises OSError. folder: a checkpoint under a temporary name.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if is_own(path.name) and not path.is_dir():
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
        return
    checkpoint_name = folder.name.split(".")[0]  # without .tmp or .old.tmp
    new_path = _rename_to_kept(folder, checkpoint_name)
    print_rank_0(f"note: files in {checkpoint_name} that no save had written are now in {new_path}")


def _rename_to_kept(path: Path, name: str) -> Path:
    """Rename `path` to the first free one of the names NAME.kept-1, NAME.kept-2 and so on, and return the new path."""
    number = 1
    while os.path.lexists(new_path := path.with_name(f"{name}.kept-{number}")):
        number += 1
    path.rename(new_path)
    return new_path

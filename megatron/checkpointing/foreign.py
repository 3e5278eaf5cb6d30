"""Files and folders in the folder of checkpoints that no save has written: they are kept."""

import os
from pathlib import Path

from ..ranks.rank_0 import print_rank_0
from .checksums import ALGORITHMS
from .files import INDEX, TENSORS


def is_own(name: str) -> bool:
    """Return whether a file of this name in the folder of a checkpoint was written by a save."""
    return name in (INDEX, *(each.sums_name for each in ALGORITHMS)) or name.endswith(TENSORS)


def is_foreign(path: Path) -> bool:
    """Return whether `path`, with the name of a checkpoint, is a file, or a folder with files of which none is own."""
    names = [each.name for each in path.glob("*")]
    return path.is_file() or bool(names) and not any(map(is_own, names))


def keep_foreign(path: Path) -> None:
    """Rename what is in the place of a checkpoint, unless a save has written it, and print a note."""
    is_link = path.is_symlink()
    if not is_link and not is_foreign(path):
        return
    number = 1
    while os.path.lexists(new_path := path.with_name(f"{path.name}.kept-{number}")):
        number += 1
    path.rename(new_path)
    kind = "a link" if is_link else "no checkpoint"
    print_rank_0(f"note: {path} was {kind}, but a new checkpoint needs its name; it was renamed to {new_path.name}")

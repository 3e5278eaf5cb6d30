"""Which checkpoints stay: the newest few, and every so many iterations one for good."""

import shutil
from pathlib import Path

from megatron.options import describe

from .files import latest_name


def prune(folder: Path, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Delete older checkpoints; a note on each that cannot be deleted.

    keep_last: how many of the newest stay; None keeps all. keep_every: those of iterations divisible by
    it stay, too. The one that `latest` names always stays. Each is renamed before it is deleted, so
    that a crash leaves no half of one under its name.
    """
    if keep_last is None:
        return []
    latest = latest_name(folder)
    names = sorted(path.name for path in folder.glob("iter_*") if path.name[5:].isdigit())
    dropped = [
        name for name in names[:-keep_last] if name != latest and not (keep_every and int(name[5:]) % keep_every == 0)
    ]
    notes = []
    for name in dropped:
        doomed = folder / f"{name}.old.tmp"
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            (folder / name).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            notes.append(
                f"the old checkpoint {folder / name} could not be deleted ({describe(error)}): delete it by hand"
            )
    return notes

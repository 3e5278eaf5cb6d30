"""Which checkpoints stay: the newest few, every so many iterations one for good, and always one that is whole."""

import shutil
from pathlib import Path

from megatron.config.fields import describe

from .files import latest_name
from .whole import is_whole


def prune(folder: Path, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Delete older checkpoints; a note on each that cannot be deleted.

    keep_last: how many of the newest stay; None keeps all. keep_every: those of iterations divisible by
    it stay, too. The one that `latest` names always stays, and the newest one up to it whose files hold all that its
    index names: whatever went wrong with newer ones, there is one to go back to. Those numbered above `latest` were given up by
    whoever went back to an earlier one by hand: they neither count nor go. Each is renamed before it is deleted, so that a
    crash leaves no half of one under its name.
    """
    if keep_last is None:
        return []
    latest = latest_name(folder)
    names = sorted(
        (path.name for path in folder.glob("iter_*") if path.name[5:].isdigit()), key=lambda name: int(name[5:])
    )
    if latest is not None and latest[5:].isdigit():
        names = [name for name in names if int(name[5:]) <= int(latest[5:])]
    dropped = [
        name for name in names[:-keep_last] if name != latest and not (keep_every and int(name[5:]) % keep_every == 0)
    ]
    if dropped:
        whole = next((name for name in reversed(names) if is_whole(folder / name)), None)
        dropped = [name for name in dropped if name != whole]
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

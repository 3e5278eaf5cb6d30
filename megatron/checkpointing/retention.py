"""Deletion of old checkpoints, except those that --keep-last and --keep-every protect and the one to resume from."""

import shutil
from pathlib import Path

from megatron.config.fields import describe
from megatron.storage import RemotePath

from .files import INDEX, latest_name, numbered_checkpoints
from .forks import Forks, without_abandoned
from .remote import delete
from .whole import is_complete


def prune(folder: Path, keep_last: int | None, keep_every: int | None, forks: Forks = ()) -> list[str]:
    """Delete old checkpoints; return a note for each checkpoint that could not be deleted.

    The checkpoint that the file `latest` names is never deleted. If it is damaged, the newest complete checkpoint
    before it is not deleted either, so that the run can resume. Checkpoints of later iterations than that of `latest`
    are neither counted nor deleted: the user has abandoned them by going back to an earlier checkpoint. As soon as
    `latest` has passed them, they are deleted without being counted. Each checkpoint is renamed before deletion, so
    that a crash leaves no partial checkpoint under a valid name.
    keep_last: number of newest checkpoints to keep; None keeps all.
    keep_every: also keep checkpoints whose iteration is divisible by this number. forks: those of the run's state.
    """
    if keep_last is None:
        return []
    try:
        return _prune(folder, keep_last, keep_every, forks)
    except OSError as error:
        return [f"old checkpoints in {folder} could not be deleted ({describe(error)}); the next save tries again"]


def _prune(folder: Path, keep_last: int, keep_every: int | None, forks: Forks) -> list[str]:
    latest = latest_name(folder)
    names = [path.name for path in numbered_checkpoints(folder).values()]
    if latest is not None and latest[5:].isdigit():
        names = [name for name in names if int(name[5:]) <= int(latest[5:])]
    own = [path.name for path in without_abandoned([folder / name for name in names], forks)]
    spared = {latest, *own[-keep_last:]}
    dropped = [name for name in names if name not in spared and not (keep_every and int(name[5:]) % keep_every == 0)]
    if dropped:
        whole = next((name for name in reversed(own) if is_complete(folder / name)), None)
        dropped = [name for name in dropped if name != whole]
    notes = []
    for name in dropped:
        if isinstance(old := folder / name, RemotePath):
            delete(old, INDEX)
            continue
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

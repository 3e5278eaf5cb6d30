"""Deletion of old checkpoints, except those that --keep-last and --keep-every protect and the one to resume from."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megatron.config.messages import describe_error
from megatron.storage import RemotePath

from .files import old_save_path
from .foreign import delete_own_files, is_foreign
from .forks import Forks, without_abandoned
from .lookup import latest_name, numbered_checkpoints
from .whole import is_complete


def prune(
    folder: Path, keep_last: int | None, keep_every: int | None, forks: Forks = (), save_interval: int = 0
) -> list[str]:
    """Delete old checkpoints; return a note for each checkpoint that could not be deleted.

    The checkpoint that the file `latest` names is never deleted. If it is damaged, the newest complete checkpoint
    before it is not deleted either, so that the run can resume. Checkpoints of later iterations than that of `latest`
    are neither counted nor deleted: the user has abandoned them by going back to an earlier checkpoint. As soon as
    `latest` has passed them, they are deleted without being counted. Each checkpoint is renamed before deletion, so
    that a crash leaves no partial checkpoint under a valid name.
    keep_last: number of newest checkpoints to keep; None keeps all.
    keep_every: also keep checkpoints that were saved at an iteration divisible by this number.
    forks: those of the run's state. save_interval: iterations between the saves of the run; 0 for irregular saves.
    """
    if keep_last is None:
        return []
    try:
        names = _names_to_delete(folder, keep_last, keep_every, forks, save_interval)
        notes = [_delete(folder / name) for name in names]
    except OSError as error:
        return [
            f"old checkpoints in {folder} could not be deleted ({describe_error(error)}); the next save tries again"
        ]
    return list(filter(None, notes))


def _names_to_delete(
    folder: Path, keep_last: int, keep_every: int | None, forks: Forks, save_interval: int
) -> list[str]:
    """Return the names of the checkpoints to delete; see `prune`."""
    latest = latest_name(folder)
    iterations = _checkpoints_up_to(latest, folder)  # name -> iteration
    paths = [folder / name for name in iterations]
    own_branch = [path.name for path in without_abandoned(paths, forks)]
    protected = {latest, *own_branch[-keep_last:]}
    if keep_every and save_interval:
        # A save that is due at a multiple of both intervals is permanent, even if skipped steps lower its number.
        protected.update(_saved_at_multiples(own_branch, math.lcm(keep_every, save_interval)))

    to_delete = []
    for name, iteration in iterations.items():
        is_permanent = keep_every is not None and iteration % keep_every == 0 and name in own_branch
        if name in protected or is_permanent or is_foreign(folder / name):
            continue
        to_delete.append(name)

    # A run must be able to resume even if the newest checkpoints are incomplete. The search for the newest complete one
    # opens files, so it is made only if something is to be deleted.
    if to_delete:
        for name in reversed(own_branch):
            if is_complete(folder / name):
                if name in to_delete:
                    to_delete.remove(name)
                break
    return to_delete


def _saved_at_multiples(names: list[str], step: int) -> Iterator[str]:
    """Yield those checkpoints that were the newest at a multiple of `step`.

    A save has the number of the last step that was not skipped. So the save at iteration 12 is iter_0000011 if step 12
    was skipped, and iter_0000008 if there was nothing new to save.
    """
    for name, next_name in pairwise(names):
        first = int(name[5:])  # without "iter_"
        end = int(next_name[5:])
        # A multiple of `step` is in range(first, end): for step 10, first 8 and end 12, it is 10: 11 // 10 > 7 // 10.
        if (end - 1) // step > (first - 1) // step:
            yield name


def _checkpoints_up_to(latest: str | None, folder: Path) -> dict[str, int]:
    """Return the name and iteration of each checkpoint that is not newer than `latest`."""
    newest = math.inf
    if latest is not None and latest[5:].isdigit():
        newest = int(latest[5:])  # without "iter_"
    return {path.name: number for number, path in numbered_checkpoints(folder).items() if number <= newest}


def _delete(checkpoint: Path) -> str | None:
    """Delete a checkpoint; return a note if that fails on this machine."""
    if isinstance(checkpoint, RemotePath):
        from .remote import delete_checkpoint

        delete_checkpoint(checkpoint)
        return None
    renamed = old_save_path(checkpoint)
    remaining = checkpoint
    try:
        delete_own_files(renamed)  # an earlier attempt may have left it
        checkpoint.rename(renamed)
        remaining = renamed
        delete_own_files(renamed)
    except OSError as error:
        return f"the old checkpoint {remaining} could not be deleted ({describe_error(error)}): delete it by hand"
    return None

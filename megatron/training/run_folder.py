"""The run directory: its locks, and the files that a run writes after all checks have passed."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tds import timeline

from ..atomic import write_text
from ..checkpointing.leftovers import delete_leftovers
from ..checkpointing.lookup import latest_name, save_folder_of
from ..checkpointing.relocation import TOKENIZER_FOLDER as TOKENIZER
from ..checkpointing.relocation import copy_tokenizer, holds_only
from ..config import Config
from ..config.command_line import with_values
from ..config.messages import describe_error
from ..config.names import ONCE
from ..locks.run_lock import CHECKPOINTS, RunLock, RunLockedError
from ..ranks.rank_0 import is_rank_0, print_notes
from ..storage import RemotePath, to_path
from ..tokenizer.load import find_vocab_file
from ..tokenizer.sibling_files import MORE_TEMPLATES
from .metrics import MetricsWriter

SETTINGS, METRICS = "config.json", "metrics.jsonl"
OUTPUTS = METRICS, "tensorboard", "mlflow", "wandb", "swanlab", timeline.FOLDER, "profile"


def save_dir_of(config: Config, run_dir: Path) -> Path:
    """Return the folder for the run's checkpoints."""
    return to_path(config.checkpoint.save) if config.checkpoint.save else run_dir / "checkpoints"


def lock(config: Config, run_dir: Path) -> list[RunLock]:
    """Lock the run directory and the checkpoint folder. Raises ValueError if a folder is in use or not writable.

    The checkpoint folder has its own lock because the --save of another run may name it.
    """
    locks = [RunLock(run_dir, config.log.override_lock)]
    try:
        checkpoints_lock = _lock_checkpoints(config, run_dir)
    except ValueError:
        release(locks)
        raise
    if checkpoints_lock is None:  # the folder needs no lock of its own, or cannot have one
        return locks
    locks.append(checkpoints_lock)
    if _is_inside(save_dir_of(config, run_dir), run_dir) and locks[0].notes:
        checkpoints_lock.notes.clear()  # both locks have a note about the same crash of an earlier run
    return locks


def _lock_checkpoints(config: Config, run_dir: Path) -> RunLock | None:
    """Lock the checkpoint folder; return None if it has no lock of its own. Raises ValueError as `lock` does."""
    save_dir = save_dir_of(config, run_dir)
    if isinstance(save_dir, RemotePath):  # object storage has no locks
        return None
    if save_dir.exists() and not save_dir.is_dir():
        raise ValueError(
            f"{save_dir} is not a folder, so it cannot hold checkpoints: move it away, or pass another --save"
        )
    if save_dir.resolve() == run_dir.resolve():  # already locked
        return None
    try:
        return RunLock(save_dir, config.log.override_lock, CHECKPOINTS)
    except RunLockedError:  # a ValueError, too: another run uses the folder
        raise
    except ValueError:
        # The lock of the run directory protects a folder inside it, too. If it is not writable, the first save reports
        # this.
        if not _is_inside(save_dir, run_dir):
            raise
        return None


def _is_inside(folder: Path, run_dir: Path) -> bool:
    return run_dir.resolve() in folder.resolve().parents


def release(locks: Sequence[RunLock]) -> None:
    """Release the locks, so that other runs can use the directories."""
    for each in reversed(locks):
        each.release()


def refuse_other_checkpoints(config: Config, run_dir: Path, iteration: int) -> None:
    """Raise ValueError if an earlier start of this run saved a checkpoint newer than `iteration` in another folder."""
    old_dir = save_folder_of(run_dir) or run_dir / "checkpoints"
    new_dir = save_dir_of(config, run_dir)
    if not old_dir.is_dir() or old_dir.resolve() == new_dir.resolve():
        return
    newest = latest_name(old_dir) or ""  # "" if there is no checkpoint yet
    newest_iteration = newest[5:]  # without "iter_"
    if newest_iteration.isdigit() and iteration < int(newest_iteration):
        raise ValueError(
            f"the run {run_dir} has its checkpoints in {old_dir} (the newest is {newest}), but this start looks for "
            f"checkpoints in {new_dir}: pass --save {old_dir} to resume the run, or another --run-dir to start a new "
            "run"
        )


def _upload_tokenizer(folder: Path, copy: RemotePath, vocab_file: str) -> None:
    """Copy the files of a tokenizer into object storage, and delete those of another tokenizer there."""
    is_same = holds_only(find_vocab_file(vocab_file), copy)  # asked before the upload replaces that file
    kept = set()
    for path in folder.rglob("*"):  # also the folder of further chat templates
        if path.is_file():
            target = copy / path.relative_to(folder)
            target.upload(path)
            kept.add(str(target))
    if is_same:
        return
    for path in [*copy.glob("*"), *(copy / MORE_TEMPLATES).glob("*")]:
        if path.is_file() and str(path) not in kept:
            path.unlink()


def settings_to_save(given_config: Config, config: Config, checkpoint: Path | None, run_dir: Path) -> Config:
    """Return the settings for config.json: those that were given, with the number of iterations and micro-batches.

    A resume takes all other changes, such as data stages and the learning-rate schedule, from its checkpoint.
    config: the settings in force. checkpoint: the checkpoint from which the run starts, if any.
    """
    values = {"gas": config.train.gas, "train_iters": config.train.train_iters}
    # ONCE resets the flags that act on a single start, such as --finetune. But after a start with the checkpoint of
    # --load, a restart before the first save starts with it again, so it needs these flags again.
    if checkpoint is None or checkpoint.parent == save_dir_of(given_config, run_dir):
        values |= ONCE
    return with_values(given_config, values)


def write_first_files(config: Config, run_dir: Path, iteration: int) -> list[str]:
    """Write the settings and the tokenizer of a run that starts at `iteration`; return notes about renamed files.

    Raises ValueError if a file cannot be written or an output is a symbolic link.
    """
    notes = []
    vocab_file = str(config.data.vocab_file)
    for name in OUTPUTS:
        path = run_dir / name
        if path.is_symlink():  # the run would overwrite the link's target
            raise ValueError(
                f"{path} is a symbolic link, so this run would overwrite {os.readlink(path)}: remove the link, or pass "
                "another --run-dir"
            )
    try:
        settings = json.dumps(config.to_dict(), indent=2)
        write_text(run_dir / SETTINGS, settings)
        copy_tokenizer(vocab_file, run_dir)
        # A checkpoint folder outside of the run directory gets its own copy of the tokenizer.
        save_dir = save_dir_of(config, run_dir)
        if isinstance(save_dir, RemotePath):
            _upload_tokenizer(run_dir / TOKENIZER, save_dir / TOKENIZER, vocab_file)
        elif not _is_inside(save_dir, run_dir):
            copy_tokenizer(vocab_file, save_dir)
        metrics = run_dir / METRICS
        if iteration == 0 and metrics.is_file() and metrics.stat().st_size:
            candidates = (run_dir / f"metrics-{n}.jsonl" for n in range(1, 10**9))
            # The first name that is free.
            old_metrics = next(path for path in candidates if not path.exists())
            os.rename(metrics, old_metrics)
            notes.append(f"this run begins at iteration 0: the metrics of the previous run were moved to {old_metrics}")
    except OSError as error:
        # The tokenizer is read from its own folder, and copied to that of --save, too.
        raise ValueError(
            f"cannot write to the run directory {run_dir} or to --save, or read the tokenizer: {describe_error(error)}"
        ) from None
    return notes


def open_run_dir(
    given_config: Config, config: Config, checkpoint: Path | None, run_dir: Path, iteration: int, locks: list[RunLock]
) -> MetricsWriter:
    """Write the first files to the run directory and return the metrics writer. Call this when all checks have passed.

    Raises ValueError if the run directory cannot be used. given_config, config, checkpoint: see `settings_to_save`.
    """
    if is_rank_0():
        refuse_other_checkpoints(config, run_dir, iteration)
        delete_leftovers(save_dir_of(config, run_dir))
        print_notes(write_first_files(settings_to_save(given_config, config, checkpoint, run_dir), run_dir, iteration))
        # The run has started: `release` does not delete a new run directory, but still a new, empty checkpoint folder.
        locks[0].keep_folders()
    return MetricsWriter(str(run_dir), iteration, is_rank_0())

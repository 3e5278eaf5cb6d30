"""The run directory: its locks, and the files that a run writes after all checks have passed."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tds import timeline

from ..atomic import write_text
from ..checkpointing.files import latest_name, saved_to
from ..checkpointing.relocation import FOLDER as TOKENIZER
from ..checkpointing.relocation import keep_tokenizer
from ..config import Config
from ..config.fields import describe
from ..locks.run_lock import CHECKPOINTS, RunLock, RunLockedError
from ..storage import RemotePath, to_path

SETTINGS, METRICS = "config.json", "metrics.jsonl"
BY_PRODUCTS = METRICS, "metrics.csv", "tensorboard", "mlflow", "wandb", "swanlab", timeline.FOLDER, "profile"


def save_dir_of(config: Config, run_dir: Path) -> Path:
    """Return the folder for the run's checkpoints."""
    return to_path(config.checkpoint.save) if config.checkpoint.save else run_dir / "checkpoints"


def lock(config: Config, run_dir: Path) -> list[RunLock]:
    """Lock the run directory and the checkpoint folder. Raises ValueError if a folder is in use or not writable.

    The checkpoint folder has its own lock because the --save of another run may name it.
    """
    override = config.log.override_lock
    found = list[RunLock]()
    try:
        found.append(RunLock(run_dir, override))
        folder = save_dir_of(config, run_dir)
        if isinstance(folder, RemotePath):  # object storage has no locks
            return found
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"{folder} is not a folder, so it cannot hold checkpoints: move it away, or pass another --save"
            )
        if folder.resolve() == run_dir.resolve():
            return found
        own = run_dir.resolve() in folder.resolve().parents
        try:
            found.append(RunLock(folder, override, CHECKPOINTS))
        except RunLockedError:
            raise
        except ValueError:
            # A checkpoint folder inside the run directory needs no lock of its own. If it is not writable, the first
            # save reports this.
            if not own:
                raise
        else:
            if own and found[0].notes:
                found[1].notes.clear()  # both locks have a note about the same crash of an earlier run
    except ValueError:
        release(found)
        raise
    return found


def keep(locks: Sequence[RunLock]) -> None:
    """Mark the run as started, so that `release` does not delete a new run directory.

    `release` still deletes a new checkpoint folder that is empty.
    """
    locks[0].keep()


def release(locks: Sequence[RunLock]) -> None:
    """Release the locks, so that other runs can use the directories."""
    for each in reversed(locks):
        each.release()


def refuse_other_checkpoints(config: Config, run_dir: Path, iteration: int) -> None:
    """Raise ValueError if an earlier start of this run saved a checkpoint newer than `iteration` in another folder."""
    before = saved_to(run_dir) or run_dir / "checkpoints"
    now = save_dir_of(config, run_dir)
    newest = latest_name(before) if before.is_dir() else None
    if newest is None or before.resolve() == now.resolve() or not newest[5:].isdigit():
        return
    if iteration < int(newest[5:]):
        raise ValueError(
            f"the run {run_dir} has its checkpoints in {before} (the newest is {newest}), but this start looks for "
            f"checkpoints in {now}: pass --save {before} to resume the run, or another --run-dir to start a new run"
        )


def _refuse_links(run_dir: Path) -> None:
    """Raise ValueError if an output file or folder is a symbolic link, as the run would overwrite the link's target."""
    for name in BY_PRODUCTS:
        path = run_dir / name
        if path.is_symlink():
            raise ValueError(
                f"{path} is a symbolic link, so this run would overwrite {os.readlink(path)}: remove the link, or pass "
                "another --run-dir"
            )


def accept(config: Config, run_dir: Path, iteration: int) -> list[str]:
    """Write the settings and the tokenizer of a run that starts at `iteration`; return notes about renamed files.

    Raises ValueError if a file cannot be written or an output is a symbolic link.
    """
    notes = []
    _refuse_links(run_dir)
    try:
        write_text(run_dir / SETTINGS, json.dumps(config.to_dict(), indent=2))
        keep_tokenizer(str(config.data.vocab_file), run_dir)
        elsewhere = save_dir_of(config, run_dir)
        if isinstance(elsewhere, RemotePath):
            for path in (run_dir / TOKENIZER).iterdir():
                if path.is_file():
                    (elsewhere / TOKENIZER / path.name).upload(path)
        elif run_dir.resolve() not in elsewhere.resolve().parents:
            keep_tokenizer(str(config.data.vocab_file), elsewhere)
        if iteration == 0 and (run_dir / METRICS).is_file() and (run_dir / METRICS).stat().st_size:
            aside = next(path for n in range(1, 10**9) if not (path := run_dir / f"metrics-{n}.jsonl").exists())
            os.rename(run_dir / METRICS, aside)
            notes.append(f"this run begins at iteration 0: the metrics of the previous run were moved to {aside}")
    except OSError as error:
        raise ValueError(f"cannot write to the run directory {run_dir}: {describe(error)}") from None
    return notes

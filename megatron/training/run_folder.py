"""The directory of a run: its locks, and the files written once all checks of the run have passed."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tds import timeline

from ..atomic import write_text
from ..checkpointing.files import latest_name
from ..checkpointing.relocation import keep_tokenizer
from ..config import Config
from . import profile
from .run_lock import CHECKPOINTS, RunLock, RunLockedError

SETTINGS, METRICS = "config.json", "metrics.jsonl"
BY_PRODUCTS = METRICS, "metrics.csv", "tensorboard", "mlflow", "wandb", timeline.FOLDER, profile.FOLDER


def save_dir_of(config: Config, run_dir: Path) -> Path:
    """Return the folder for the run's checkpoints."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / "checkpoints"


def lock(config: Config, run_dir: Path) -> list[RunLock]:
    """Lock the run directory, and the checkpoint folder, as another run's --save may name it. Raises ValueError."""
    override, found = config.log.override_lock, list[RunLock]()
    try:
        found.append(RunLock(run_dir, override))
        folder = save_dir_of(config, run_dir)
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"{folder} is not a folder, so it cannot hold checkpoints: move it away, or give another --save"
            )
        if folder.resolve() == run_dir.resolve():
            return found
        own = run_dir.resolve() in folder.resolve().parents
        try:
            found.append(RunLock(folder, override, CHECKPOINTS))
        except RunLockedError:
            raise
        except ValueError:
            if not own:  # if the folder is inside the run directory, start: the first save will report what is wrong
                raise
        else:
            if own and found[0].notes:
                found[1].notes.clear()  # both locks have a note on the same crash of an earlier run: keep one
    except ValueError:
        release(found)
        raise
    return found


def keep(locks: Sequence[RunLock]) -> None:
    """Keep `release` from deleting a new run directory, as the run has begun.

    A new checkpoint folder is still deleted if it stays empty.
    """
    locks[0].keep()


def release(locks: Sequence[RunLock]) -> None:
    """Unlock the directories for other runs."""
    for each in reversed(locks):
        each.release()


def refuse_other_checkpoints(config: Config, run_dir: Path, iteration: int) -> None:
    """Raise ValueError if an earlier start saved newer checkpoints than `iteration` in another folder."""
    try:
        saved = json.loads((run_dir / SETTINGS).read_text(encoding="utf-8"))["checkpoint"]["save"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    before, now = Path(saved or run_dir / "checkpoints"), save_dir_of(config, run_dir)
    newest = latest_name(before) if before.is_dir() else None
    if newest is None or before.resolve() == now.resolve() or not newest[5:].isdigit():
        return
    if iteration < int(newest[5:]):
        raise ValueError(
            f"{run_dir} has its checkpoints in {before} (the newest is {newest}), but this start would look for "
            f"them in {now}: --save {before} resumes from them, another --run-dir starts a new run"
        )


def _refuse_links(run_dir: Path) -> None:
    """Raise ValueError for an output that is a symbolic link, as the run would overwrite the link's target."""
    for name in BY_PRODUCTS:
        path = run_dir / name
        if path.is_symlink():
            raise ValueError(
                f"{path} is a link to {os.readlink(path)}, which this run would write to: remove the link, or give "
                "another --run-dir"
            )


def accept(config: Config, run_dir: Path, iteration: int) -> list[str]:
    """Write the settings of a run that starts at `iteration`; return notes on files moved aside. Raises ValueError."""
    notes = []
    _refuse_links(run_dir)
    try:
        write_text(run_dir / SETTINGS, json.dumps(config.to_dict(), indent=2))
        keep_tokenizer(str(config.data.vocab_file), run_dir)
        elsewhere = save_dir_of(config, run_dir)
        if run_dir.resolve() not in elsewhere.resolve().parents:
            keep_tokenizer(str(config.data.vocab_file), elsewhere)
        if iteration == 0 and (run_dir / METRICS).is_file() and (run_dir / METRICS).stat().st_size:
            aside = next(path for n in range(1, 10**9) if not (path := run_dir / f"metrics-{n}.jsonl").exists())
            os.rename(run_dir / METRICS, aside)
            notes.append(f"this run begins at iteration 0: the metrics of the previous run were moved to {aside}")
    except OSError as error:
        raise ValueError(f"cannot write to the run directory {run_dir}: {error.strerror}") from None
    return notes

"""Checks of the run directory: writable, unlocked, enough space, and a checkpoint that can be resumed."""

import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.storage import RemotePath

from .finding import Findings, failed, ok, warning


def nearest_folder(path: Path) -> Path:
    """Return `path` or its nearest existing parent."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_writable(run_dir: Path) -> Findings:
    """Check by creating a temporary file that the run directory is writable. Permission bits would not suffice."""
    folder = nearest_folder(run_dir)
    try:
        with create_marker(run_dir):
            pass
    except OSError as error:
        yield failed(
            "run directory", f"cannot write to {folder}: {error.strerror}", "give a --run-dir that you can write to"
        )
    else:
        words = f"{folder} is writable"
        if folder != run_dir.absolute():
            words += f"; {run_dir} will be created"
        yield ok("run directory", words)


def check_lock(run_dir: Path, config: Config | None = None) -> Findings:
    """Check that no other run holds the lock of the run directory or of the checkpoint folder.

    config: settings of the run; None if they are invalid or not given, so --save is unknown.
    """
    from megatron.locks.run_lock import LOCK_FILE, living_holder
    from megatron.training.run_folder import save_dir_of

    save_dir = save_dir_of(config, run_dir) if config else run_dir / "checkpoints"
    locks = [run_dir / LOCK_FILE]
    if not isinstance(save_dir, RemotePath):  # object storage has no locks
        locks.append(save_dir / LOCK_FILE)
    held = [path for path in locks if path.exists()]
    if not held:
        yield ok("run lock", "not held")
        return
    # A run holds both locks, so one line is enough: that of a lock which would stop the next run, if there is one.
    for path in held:
        holder = living_holder(path)
        if holder is not None:
            flag = "--run-dir" if path.parent == run_dir else "--save"
            yield failed(
                "run lock",
                f"{path.parent} is in use by {holder}",
                f"end that process, or give another {flag}; if it ran on another machine and has ended, delete {path}",
            )
            return
    yield warning(
        "run lock",
        f"{held[0]} was left by a run that has ended",
        "ignore this warning: the next run takes the lock over",
    )


def check_disk(save_dir: Path, run_dir: Path, checkpoint_bytes: float, config: Config) -> Findings:
    """Check that the disk has space for the run's checkpoints.

    checkpoint_bytes: bytes of one checkpoint. A new checkpoint is written before an old one is deleted. Checkpoints in
    object storage need space for one in the run directory, where their files wait for the upload.
    """
    if not config.checkpoint.save_interval and not config.checkpoint.save_at_end:
        yield ok("disk", "no checkpoint is saved")
        return
    is_remote = isinstance(save_dir, RemotePath)
    # Files for object storage wait in the run directory for their upload.
    folder = nearest_folder(run_dir if is_remote else save_dir)
    free = shutil.disk_usage(folder).free
    if is_remote:
        words = f"{free / 1e9:.1f} GB free for the upload of a checkpoint, which takes {checkpoint_bytes / 1e9:.2g} GB"
        if free >= checkpoint_bytes:
            yield ok("disk", words)
        else:
            yield failed("disk", words, "free space, or give another --run-dir")
        return
    words = f"{free / 1e9:.1f} GB free, a checkpoint takes {checkpoint_bytes / 1e9:.2g} GB"
    remedy = "free space, set --save to another disk, or keep fewer checkpoints (--keep-last 2)"
    num_permanent = _permanent_to_come(save_dir, config)
    if num_permanent:
        words += f", and --keep-every {config.checkpoint.keep_every} will keep {num_permanent} of them"
        remedy = "free space, set --save to another disk, or raise --keep-every"
    # Without --keep-last every checkpoint stays, so space for ten is wanted. Else it is enough to hold the newest ones,
    # those of --keep-every, and the new one.
    wanted_bytes = 10 * checkpoint_bytes
    keep_last = config.checkpoint.keep_last
    if keep_last is not None:
        wanted_bytes = (keep_last + num_permanent + 1) * checkpoint_bytes
    if free < 2 * checkpoint_bytes:
        yield failed("disk", f"{words}, and a new checkpoint is written before an old one is deleted", remedy)
    elif free < wanted_bytes:
        yield warning("disk", words, remedy)
    else:
        yield ok("disk", words)


def _permanent_to_come(save_dir: Path, config: Config) -> int:
    """Return how many checkpoints the run will keep because of --keep-every, besides those in `save_dir`."""
    from megatron.checkpointing.lookup import numbered_checkpoints

    settings = config.checkpoint
    if not settings.keep_every or not settings.save_interval:
        return 0
    newest = max(numbered_checkpoints(save_dir), default=0)
    # A checkpoint is permanent if its iteration is a multiple of both numbers: with --keep-every 300 and
    # --save-interval 200, every 600 iterations. A run of 2000 iterations has 3 of them; at iteration 700, 3 - 1 = 2 are
    # still to come.
    step = math.lcm(settings.keep_every, settings.save_interval)
    return max(config.train.train_iters // step - newest // step, 0)


def check_resume(config: Config, run_dir: Path, fingerprint: str | None, quick: bool, retry: bool = True) -> Findings:
    """Check that the checkpoint from which the run would resume is intact and fits the settings.

    fingerprint: SHA-256 of the run's tokenizer. quick: skip the check that the checkpoint is intact.
    retry: check the newest checkpoint once more if a run deletes this one meanwhile.
    """
    from megatron.checkpointing import Wanted
    from megatron.checkpointing.contradictions import refuse_contradictions
    from megatron.checkpointing.files import CheckpointError
    from megatron.checkpointing.lookup import latest_checkpoint
    from megatron.checkpointing.pruned import was_deleted
    from megatron.checkpointing.reader import CheckpointReader
    from megatron.checkpointing.resume import find_loaded, ignores_load
    from megatron.training.run_folder import refuse_other_checkpoints, save_dir_of

    save_dir = save_dir_of(config, run_dir)
    load = config.checkpoint.load
    resume_remedy = "use the settings of the checkpoint, or another --load, or another --run-dir for a new run"
    path = None
    try:
        # The run's own checkpoints come before that of --load, with which a new run starts.
        path = latest_checkpoint(save_dir)
        wanted = Wanted.from_config(config, ignores_load(path, config, save_dir))
        if path is None and load:
            path = find_loaded(load, config, save_dir)
        if path is None:
            try:
                refuse_other_checkpoints(config, run_dir, 0)
            except ValueError as error:
                yield failed("resume", str(error), resume_remedy)
            else:
                yield ok("checkpoint", "no checkpoint exists, so the run begins at iteration 0")
            return
        reader = CheckpointReader(path)
        if not quick:
            reader.verify()
    except CheckpointError as error:
        if retry and path and was_deleted(path):
            yield from check_resume(config, run_dir, fingerprint, quick, retry=False)
            return
        yield failed(
            "checkpoint",
            str(error),
            "give another --load; without --load, write the name of an earlier intact checkpoint into the file latest, "
            "or use another --run-dir",
        )
        return
    words = f"{path} is intact, iteration {reader.state['iteration']}"
    if quick:
        words = f"{path}, not verified (--quick)"
    yield ok("checkpoint", words)
    iteration = reader.state["iteration"] if wanted.position else 0
    try:
        refuse_contradictions(reader, config, fingerprint, wanted)
        refuse_other_checkpoints(config, run_dir, iteration)
    except ValueError as error:
        yield failed("resume", str(error), resume_remedy)
    else:
        yield from _check_samples(reader, config, wanted)


def _check_samples(reader: Any, config: Config, wanted: Any) -> Findings:
    """Check that seed, split and corpora match the checkpoint, so that the resumed run sees the same samples.

    The finding may also name the learning-rate schedule that the run continues.
    """
    from megatron.checkpointing.data_plan import join_stages, split_selects_others
    from megatron.checkpointing.reader import plain_config
    from megatron.config.batches import Consumed
    from megatron.optim.resumed_lr import resolve_lr_schedule

    saved_config = plain_config(reader)
    consumed_samples = reader.state["consumed_samples"]
    # Samples matter only if the run continues at its position in the same data.
    if wanted.same_data and wanted.position and consumed_samples:
        saved_data = saved_config.data
        compared: dict[str, tuple[Any, Any]] = {"seed": (saved_config.train.seed, config.train.seed)}
        if split_selects_others(saved_config, config):
            compared["split"] = (saved_data.split, config.data.split)
        for name, (saved_value, current_value) in compared.items():
            if saved_value != current_value:
                yield failed(
                    "resume",
                    f"--{name} is {saved_value} in the checkpoint but {current_value} in the settings: "
                    f"the {consumed_samples} samples consumed so far would differ",
                    f"pass --{name} {saved_value}, or --override-data to continue with other samples",
                )
                return
        consumed = Consumed(consumed_samples, reader.state.get("consumed_tokens", 0))
        if config.data.names_corpora and saved_data.paths != config.data.paths:
            # After --override-data, the checkpoint has stages of which the flags name only the last one. Training then
            # continues the checkpoint's stages, which are "" here if the flags name other corpora.
            continued_stages, _ = join_stages(saved_config, config, consumed, override=False)
            if not continued_stages:
                yield warning(
                    "resume",
                    "the run's corpora have other paths than the checkpoint's; training will compare the consumed "
                    "samples and stop if they differ",
                    "pass the same corpora as in the checkpoint, or --override-data to continue with other samples",
                )
                return
    words = "the settings match the checkpoint"
    if wanted.position and reader.state["iteration"]:
        _, note = resolve_lr_schedule(config, saved_config)
        if note:
            words += f"; {note}"
    yield ok("resume", words)


def create_marker(run_dir: Path) -> Any:
    """Create a temporary file in the run directory or its nearest existing parent.

    The other hosts look for this file to check that they share the disk. The returned context manager deletes the file
    on exit.
    """
    return tempfile.NamedTemporaryFile(dir=nearest_folder(run_dir), prefix=f".doctor-{os.getpid()}-")

"""The start of a run: from its own newest checkpoint, from the checkpoint of --load, or from scratch."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.config import Config
from megatron.ranks.agreement import raise_on_all_ranks
from megatron.ranks.errors import RunError
from megatron.ranks.objects import broadcast_from_rank_0
from megatron.ranks.rank_0 import is_rank_0, num_ranks, print_notes, print_rank_0
from megatron.storage import to_path

from .consumed import hash_samples, initial_hash
from .files import CheckpointError
from .leftovers import restore_replaced
from .lookup import find_checkpoint, is_own_folder, latest_checkpoint, numbered_checkpoints
from .reader import CheckpointReader, plain_config
from .state import TrainState
from .wanted import Wanted


class Start(NamedTuple):
    """The checkpoint to start from (None to start from scratch) and the parts to load from it."""

    path: Path | None
    wanted: Wanted


def find_loaded(load: str, config: Config, save_dir: str | Path) -> Path | None:
    """Return the checkpoint of --load, or None if there is none and the run begins with new weights.

    It does if `load` is a folder of this run itself, because one command then starts and resumes the run, but not with
    --exit-on-missing-checkpoint. Otherwise, raises CheckpointError without a checkpoint.
    """
    try:
        return find_checkpoint(load)
    except CheckpointError:
        if is_own_folder(load, config, save_dir) and not config.checkpoint.exit_on_missing_checkpoint:
            return None
        raise


def ignores_load(own_checkpoint: Path | None, config: Config, save_dir: str | Path) -> bool:
    """Return whether a run ignores --load, as it resumes from `own_checkpoint`.

    --load that names the folder of this run itself, as in Megatron-LM's commands, is the run's own checkpoint.
    """
    load = config.checkpoint.load
    return own_checkpoint is not None and load is not None and not is_own_folder(load, config, save_dir)


def find_start(config: Config, save_dir: str) -> Start:
    """Return the checkpoint to start from: this run's newest checkpoint, else that of --load, else none.

    If any rank fails, or the nodes do not share `save_dir`, every rank raises RunError.
    """
    folder = to_path(save_dir)
    if num_ranks() > 1:
        from .shared_folder import check_shared

        check_shared(folder, config)
    load = config.checkpoint.load
    path = None  # this run's own newest checkpoint; None at its first start
    with raise_on_all_ranks():  # Rank 0 alone looks, because a run that is training may replace `latest` meanwhile.
        if is_rank_0():
            restore_replaced(folder)
            path = latest_checkpoint(folder)
    path = broadcast_from_rank_0(path)
    # Rank 0 decides, because links may differ between nodes.
    is_load_ignored = broadcast_from_rank_0(ignores_load(path, config, save_dir))
    wanted = Wanted.from_config(config, is_load_ignored)
    if is_load_ignored:
        # The flags that leave out parts of the checkpoint of --load are ignored, too.
        flags = {
            f"--load {load}": True,
            "--finetune": config.checkpoint.finetune,
            "--no-load-optim": not config.checkpoint.load_optim,
            "--no-load-rng": not config.checkpoint.load_rng,
        }
        ignored = " ".join(flag for flag, is_given in flags.items() if is_given)
        print_rank_0(f"{ignored}: ignored, as this run resumes from its own checkpoint {path}")
    elif path is not None and config.checkpoint.finetune:  # --load is not ignored, so it names this run's own folder
        raise RunError(
            f"--finetune would start again from {path} at each restart, as --load {load} is the folder of this run "
            f"itself; pass another --save, or leave --finetune out to resume"
        )
    elif load and path is None:  # the first start
        with raise_on_all_ranks():
            path = find_loaded(load, config, save_dir) if is_rank_0() else None
        path = broadcast_from_rank_0(path)
        if path is None:
            print_rank_0(f"note: --load {load} holds no checkpoint yet: the run begins with new weights")
    return Start(path, wanted)


def resumed_position(start: Start) -> tuple[int, int]:
    """Return the (iteration, consumed samples) from which the run continues, (0, 0) for a new one.

    All ranks must call this.
    """
    position = 0, 0
    with raise_on_all_ranks():
        if is_rank_0() and start.path is not None and start.wanted.position:
            state = CheckpointReader(start.path).state
            position = state["iteration"], state["consumed_samples"]
    return broadcast_from_rank_0(position)


def start_or_resume(
    start: Start, config: Config, engine: Any, fingerprint: str, dataset: Any
) -> tuple[TrainState, Config]:
    """Load the checkpoint that `find_start` returned, if any.

    Returns the state of the run, and `config`. If the run continues the checkpoint's learning-rate schedule, this
    schedule replaces the one in `config`.
    Rank 0 checks that the samples consumed so far are those of `dataset`, the training data set.
    If any rank fails, every rank raises RunError.
    """
    path = start.path
    with raise_on_all_ranks():
        initial_hash_value = initial_hash(config) if is_rank_0() else 0
    if path is None:
        return TrainState(sample_hash=initial_hash_value), config
    from .load import load_checkpoint

    state = load_checkpoint(path, engine, config, fingerprint, start.wanted)
    if not start.wanted.position:
        print_rank_0(f"this run starts with the weights of {path}")
        state.sample_hash = initial_hash_value
        return state, config
    with raise_on_all_ranks():
        saved = plain_config(CheckpointReader(path))
        # Rank 0 alone lists the folder, because other ranks may see other checkpoints or another time. If this resume
        # abandons later checkpoints, it is a fork.
        if is_rank_0() and any(each > state.iteration for each in numbered_checkpoints(path.parent)):
            state.forks = (*state.forks, (state.iteration, int(time.time())))
    state.forks = broadcast_from_rank_0(state.forks)
    print_rank_0(f"resumed at iteration {state.iteration} after {state.consumed_samples} samples")
    # Iteration 0 means imported weights. Their checkpoint has only a default learning-rate schedule: ignore it.
    if state.iteration:
        from megatron.optim.resumed_lr import resolve_lr_schedule

        from .changes import training_notes

        config, note = resolve_lr_schedule(config, saved)
        notes = [note, _batch_schedule_note(saved, config, state.consumed_samples)]
        notes += training_notes(saved, config, state, dist.get_world_size())
        print_notes(filter(None, notes))
    with raise_on_all_ranks():
        if is_rank_0():
            state.sample_hash = hash_samples(initial_hash_value, state, saved, config, dataset, start.wanted)
        else:  # rank 0 alone keeps and saves the hash
            state.sample_hash = 0
    return state, config


def step_lags(path: Path | None, wanted: Wanted) -> dict[str, int]:
    """Return, by name, by how many steps the step counts of weights in a checkpoint are lower than the optimizer's.

    Weights that were frozen or never had a gradient lag by all steps; weights that are not in the result do not lag.
    """
    if path is None or not wanted.optimizer:
        return {}
    optimizer = CheckpointReader(path).optimizer
    if not optimizer["moments"]:
        return {}
    # Weights without moments count 0 steps, unless "steps" has another count.
    counts = dict.fromkeys(optimizer.get("without_moments", ()), 0) | optimizer.get("steps", {})
    return {name: optimizer["step"] - count for name, count in counts.items()}


def _batch_schedule_note(saved: Config, config: Config, consumed: int) -> str | None:
    """Return a message if --batch-size-schedule differs from the checkpoint's, else None."""
    saved_schedule = saved.train.batch_size_schedule
    schedule = config.train.batch_size_schedule
    if saved_schedule == schedule:
        return None
    ranks = dist.get_world_size()
    ahead = config.batch_schedule(ranks).after(consumed)
    # Other words may give the same sizes from here on. For example, once 0:256 of "0:256 5000_samples:512" is over,
    # "0:512" gives the same.
    if saved_schedule and schedule and saved.batch_schedule(ranks).after(consumed) == ahead:
        return None
    samples = ahead.sizes[0]
    return (
        f"--batch-size-schedule is {schedule or 'not given'}, but was {saved_schedule or 'not given'} in the "
        f"checkpoint; only the position in samples counts: from sample {consumed} on, an iteration has {samples} "
        f"samples"
    )

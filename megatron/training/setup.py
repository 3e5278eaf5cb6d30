"""Setup of a run from its settings: starts the ranks, opens the data, builds the engine, loads the checkpoint."""

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import torch

from .. import mpu
from ..checkpointing import RetryingSaver, Saver, find_start, start_or_resume
from ..checkpointing.data_plan import with_consumed_data
from ..checkpointing.pruned import explain_if_deleted
from ..checkpointing.resume import step_lags
from ..config import Config
from ..config.command_line import with_values
from ..config.ds_config import Resolved
from ..locks.run_lock import RunLock
from ..model.parameter_counts import count_parameters
from ..ranks.agreement import raise_on_all_ranks, require_equal_code, require_equal_values, tokenizer_identity
from ..ranks.initialize import initialize_megatron, use_step_timeout
from ..ranks.objects import broadcast_from_rank_0
from ..ranks.rank_0 import is_rank_0, num_ranks, print_notes, print_rank_0
from ..timers import Timers
from ..tokenizer import Tokenizer, load_tokenizer
from . import run_folder
from .build import build_engine, build_model
from .data_ranks import open_datasets
from .feature import Feature, Plan
from .features import Features
from .global_vars import publish
from .inputs import reads_corpora
from .run_state import Run
from .task import Task, describe


def set_up(task: Task, config: Config, resolved: Resolved, own_features: Sequence[Feature] = ()) -> Run:
    """Return a new or resumed run of `task`, ready to train. Raises RunError on every rank if the run cannot start.

    own_features: features besides those that the settings ask for.
    """
    device = initialize_megatron(config)
    timers = Timers(device)
    default_run_dir = new_run_dir(task)
    with raise_on_all_ranks():
        config, tokenizer, run_dir = prepare_settings(task, config, default_run_dir)
    require_equal_values({"--precision": resolved.precision, **tokenizer_identity(tokenizer)})
    publish(config, tokenizer, timers, resolved.precision)
    with raise_on_all_ranks():
        features = Features(config, own_features)
    with raise_on_all_ranks():  # a block of its own: after an error of another rank, nothing would release the locks
        locks = run_folder.lock(config, run_dir) if is_rank_0() else []
    try:
        _print_layout(config, resolved, device, locks)
        save_dir = str(run_folder.save_dir_of(config, run_dir))
        start = find_start(config, save_dir)  # the checkpoint to start from, if any
        given_config = config  # `config` also gets the data stages and the learning-rate schedule of the checkpoint
        config = with_consumed_data(config, start.path, start.wanted, reads_corpora(task))
        plan = Plan(task, config, resolved, device, tokenizer)
        for feature in features:
            with raise_on_all_ranks():
                feature.prepare(plan)
        datasets = open_datasets(task, given_config, config, tokenizer, start)

        # The checkpoint, if there is one, replaces all initial weights, so they need not be drawn.
        with mpu.skip_init() if start.path else nullcontext():
            model = build_model(plan)
        parameters = count_parameters(model)
        # Weights with equal step counts share an optimizer group, so the counts are read before the engine is built.
        with explain_if_deleted(start.path), raise_on_all_ranks():
            lags = step_lags(start.path, start.wanted)
        engine = build_engine(model, plan, features, timers, lags)
        require_equal_code()  # again, because the task may have imported further modules since the start
        if num_ranks() > 1:
            engine.watch_steps(60 * config.parallel.distributed_timeout_minutes)

        # Load the checkpoint. It may replace the learning-rate schedule in `config`.
        with explain_if_deleted(start.path):
            state, config = start_or_resume(start, config, engine.deepspeed, tokenizer.fingerprint, datasets[0])
        config = config.with_derived_iters(num_ranks(), state.iteration, state.consumed_samples)
        with raise_on_all_ranks():
            features.load(state.features)
            metrics = run_folder.open_run_dir(given_config, config, start.path, run_dir, state.iteration, locks)
    except BaseException:
        run_folder.release(locks)
        raise
    publish(config, tokenizer, timers, resolved.precision)  # again, as `config` has changed
    use_step_timeout(config)
    is_async = config.checkpoint.async_save
    saver = Saver(save_dir, engine.deepspeed, config, tokenizer.fingerprint, is_async, run_dir / "upload")
    retrying_saver = RetryingSaver(saver, config.checkpoint.max_failed_saves)
    return Run(
        config, resolved, device, engine, datasets, state, retrying_saver, timers, metrics, tokenizer, run_dir,
        parameters, locks, features,
    )  # fmt: skip


def new_run_dir(task: Task) -> str:
    """Return the directory of a run that gets neither --run-dir nor --save. All ranks must call this."""
    # The name has microseconds, because runs of a sweep may start in one second.
    return f"runs/{task.name}-{broadcast_from_rank_0(datetime.now().strftime('%Y%m%d-%H%M%S-%f'))}"


def prepare_settings(task: Task, config: Config, default_run_dir: str) -> tuple[Config, Tokenizer, Path]:
    """Return (config with vocabulary size and run directory, tokenizer, run directory).

    Raises ValueError if the tokenizer cannot be loaded or does not fit the settings.
    """
    if config.data.vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file; tools/train_tokenizer.py makes one")
    tokenizer = task.extended(config, load_tokenizer(config.data.vocab_file, config.data.tokenizer_type))
    if not hasattr(tokenizer, "vocab_size"):
        raise ValueError(f"{type(task).__name__}.extended returns {describe(tokenizer)}: return a tokenizer")
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:  # a larger one only has ids that never occur
        raise ValueError(
            f"--vocab-size {vocab_size} is less than the {tokenizer.vocab_size} tokens of {config.data.vocab_file} "
            "and the sentinels that a T5 adds (--num-sentinels); raise it or leave it out"
        )
    run_dir = config.log.run_dir or config.checkpoint.save or default_run_dir
    return with_values(config, {"vocab_size": vocab_size, "run_dir": run_dir}), tokenizer, Path(run_dir)


def _print_layout(config: Config, resolved: Resolved, device: torch.device, locks: Sequence[RunLock]) -> None:
    """Print the parallel grid, the precision and the global batch, and the notes of the locks and the settings."""
    grid = mpu.get_topology()
    world_size = grid.world_size()
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    mode = "no pipeline" if config.parallel.pipe_parallel_size == 0 else "pipeline"
    precision = "fp8" if config.train.precision == "fp8" else resolved.precision  # which is bf16 with fp8
    print_rank_0(
        f"{ranks} on {device.type}: {grid} ({mode}), {precision}, ZeRO {resolved.zero_stage}, "
        f"global batch {config.batch_schedule(world_size)}"
    )
    for lock in locks:
        print_notes(lock.notes)
    print_notes(resolved.notes)

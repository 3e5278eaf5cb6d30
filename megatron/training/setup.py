"""Setup of a run from its settings: starts the ranks, opens the data, builds the engine, loads the checkpoint."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import mpu
from ..checkpointing import RetryingSaver, Saver, find_start, start_or_resume
from ..checkpointing.data_plan import with_consumed_data
from ..checkpointing.load import step_lags
from ..checkpointing.pruned import explain_if_deleted
from ..config import Config
from ..config.command_line import with_values
from ..config.ds_config import Resolved
from ..locks.run_lock import RunLock
from ..model.parameter_counts import count_parameters
from ..ranks.agreement import raise_on_all_ranks, require_equal_code, require_equal_values, tokenizer_identity
from ..ranks.initialize import initialize_megatron, use_step_timeout
from ..ranks.objects import broadcast_from_rank_0
from ..ranks.rank_0 import is_rank_0, print_notes, print_rank_0
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
        locks = run_folder.lock(config, run_dir) if is_rank_0() else []
    try:
        _print_layout(config, resolved, device, locks)
        save_dir = str(run_folder.save_dir_of(config, run_dir))
        start = find_start(config, save_dir)
        config = with_consumed_data(config, start.path, start.wanted, reads_corpora(task))
        plan = Plan(task, config, resolved, device, tokenizer)
        features.prepare(plan)
        datasets = open_datasets(task, config, tokenizer, start)
        with mpu.skip_init() if start.path else nullcontext():  # the checkpoint replaces all initial values
            model = build_model(plan)
        parameters = count_parameters(model)
        with explain_if_deleted(start.path), raise_on_all_ranks():
            lags = step_lags(start.path, start.wanted)
        engine = build_engine(model, plan, features, timers, lags)
        require_equal_code()  # again, because the task may have imported further modules since the start
        if dist.get_world_size() > 1:
            engine.watch_steps(60 * config.parallel.distributed_timeout_minutes)
        with explain_if_deleted(start.path):
            state, config = start_or_resume(start, config, engine.deepspeed, tokenizer.fingerprint, datasets[0])
        config = config.with_batches(dist.get_world_size(), state.iteration, state.consumed_samples)
        with raise_on_all_ranks():
            features.load(state.features)
            metrics = run_folder.open_run_dir(config, run_dir, save_dir, state.iteration, locks)
    except BaseException:
        run_folder.release(locks)
        raise
    # A second call, because the checkpoint may have set the learning-rate schedule.
    publish(config, tokenizer, timers, resolved.precision)
    use_step_timeout(config)
    saver = _build_saver(config, save_dir, engine.deepspeed, tokenizer.fingerprint, run_dir)
    return Run(
        config, resolved, device, engine, datasets, state, saver, timers, metrics, tokenizer, run_dir, parameters,
        locks, features,
    )  # fmt: skip


def _build_saver(config: Config, save_dir: str, engine: Any, fingerprint: str, run_dir: Path) -> RetryingSaver:
    """Return the saver of the run's checkpoints. fingerprint: SHA-256 of the tokenizer."""
    is_async = config.checkpoint.async_save
    upload_dir = run_dir / "upload"
    saver = Saver(save_dir, engine, config, fingerprint, is_async, upload_dir)
    return RetryingSaver(saver, config.checkpoint.max_failed_saves)


def new_run_dir(task: Task) -> str:
    """Return the directory of a run that gets neither --run-dir nor --save. All ranks must call this."""
    return f"runs/{task.name}-{broadcast_from_rank_0(time.strftime('%Y%m%d-%H%M%S'))}"


def prepare_settings(task: Task, config: Config, default_run_dir: str) -> tuple[Config, Tokenizer, Path]:
    """Return (config with vocabulary size and run directory, tokenizer, run directory).

    Raises ValueError if the tokenizer cannot be loaded or does not fit the settings.
    """
    if config.data.vocab_file is None:
        raise ValueError("no tokenizer: give --vocab-file; tools/train_tokenizer.py makes one")
    tokenizer = task.extended(config, load_tokenizer(config.data.vocab_file, config.data.tokenizer_type))
    if not hasattr(tokenizer, "vocab_size"):
        raise ValueError(f"{type(task).__name__}.extended returns {describe(tokenizer)}: return a tokenizer")
    given = config.model.vocab_size
    if given is not None and given < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {given} is less than the {tokenizer.vocab_size} tokens of {config.data.vocab_file}; raise "
            f"it or leave it out"
        )
    config = with_values(config, {"vocab_size": given or tokenizer.vocab_size})
    run_dir = config.log.run_dir or config.checkpoint.save or default_run_dir
    return with_values(config, {"run_dir": run_dir}), tokenizer, Path(run_dir)


def _print_layout(config: Config, resolved: Resolved, device: torch.device, locks: Sequence[RunLock]) -> None:
    grid = mpu.get_topology()
    precision = "fp8" if config.train.precision == "fp8" else resolved.precision  # the latter is then bf16
    mode = "no pipeline" if config.parallel.pipe_parallel_size == 0 else "pipeline"
    print_rank_0(
        f"{grid.world_size()} rank{'s' if grid.world_size() > 1 else ''} on {device.type}: {grid} ({mode}), "
        f"{precision}, ZeRO {resolved.zero_stage}, global batch "
        f"{config.batches(grid.world_size())}"
    )
    for lock in locks:
        print_notes(lock.notes)
    print_notes(resolved.notes)

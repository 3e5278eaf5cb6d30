"""The checks of `--dry-run N`: what a run of N ranks does up to its first step, in one process and without weights."""

import os
from pathlib import Path
from typing import Any

import torch

from tds.schedule import ScheduleError, find_schedule, make_plan
from tds.timetable import check_plan

from ..checkpointing import CheckpointReader, TrainState, find_start, plain_config
from ..checkpointing.consumed import hash_samples, initial_hash
from ..checkpointing.contradictions import refuse_contradictions
from ..checkpointing.data_plan import with_consumed_data
from ..checkpointing.resume import resumed_position
from ..config import Config
from ..config.command_line import with_values
from ..config.ds_config import Resolved, resolve
from ..config.fields import ConfigError
from ..estimate.per_rank import rank_memory
from ..estimate.sizes import parameters, stages_of
from ..ranks import device as device_module
from ..ranks.initialize import initialize_megatron, world_size
from ..ranks.rank_0 import print_notes, print_rank_0
from ..storage import RemotePath
from ..timers import Timers
from ..training import run_folder
from ..training.console import format_count
from ..training.data_ranks import open_datasets
from ..training.global_vars import publish
from ..training.inputs import reads_corpora, require_inputs
from ..training.setup import new_run_dir, prepare_settings
from ..training.task import Task
from .task_sets import read_tasks
from .writers import check_packages

# With more instructions than this, fewer micro-batches are checked, since the others repeat the steady state.
MAX_INSTRUCTIONS = 1 << 16
# A layout of one process: no weights are built, so only the data sees it.
ONE_PROCESS_LAYOUT = {
    "model_parallel_size": 1, "sequence_parallel": None, "context_parallel_size": 1, "expert_parallel_size": 1,
    "pipe_parallel_size": 0, "virtual_pipeline_size": 1, "pipeline_schedule": "1f1b", "pipeline_extra_warmup": 0,
    "partition_method": "balanced", "zero_stage": None, "deepspeed_config": None,
}  # fmt: skip


def check_run(task: Task, config: Config, ranks: int) -> None:
    """Check a run of `ranks` ranks, and print what it would do.

    Checks the layout, the ds_config, the tokenizer, the data and its first sample, the memory of each stage from the
    shapes of its tensors, the schedule, the checkpoint that the run would load, the files of --eval-tasks, and whether
    its folder is writable.
    Raises ValueError, in one sentence, for what the run would refuse.
    """
    if world_size() > 1:
        raise ValueError(f"--dry-run {ranks} checks all ranks in one process, but WORLD_SIZE is {world_size()}")
    config = config.with_derived_iters(ranks)
    require_inputs(task, config)
    check_packages(config.log)
    replicas = config.parallel.data_parallel_size(ranks)
    device = device_module.current_device()
    resolved = resolve(config, ranks, device_module.has_fast_bf16(device))
    # This process reads the data of all replicas, so it has their micro-batches.
    local_config = with_values(config, {**ONE_PROCESS_LAYOUT, "gas": config.train.gas * replicas})
    initialize_megatron(local_config)
    config, tokenizer, run_dir = prepare_settings(task, config, new_run_dir(task))
    local_config = with_values(local_config, {"vocab_size": config.model.vocab_size})
    publish(local_config, tokenizer, Timers(device), resolved.precision)
    layout = config.parallel
    print_rank_0(
        f"dry run of {ranks:,} ranks: data {replicas} x pipe {layout.stages} x model {layout.model_parallel_size} x "
        f"context {layout.context_parallel_size}, {resolved.precision}, ZeRO {resolved.zero_stage}, global batch "
        f"{config.train_batch_size(ranks):,}"
    )
    print_notes(resolved.notes)
    for line in _memory(config, resolved, ranks, device):
        print_rank_0(line)
    _check_schedule(config)
    folder = run_folder.save_dir_of(config, run_dir)
    start = find_start(config, str(folder))
    local_config = with_consumed_data(local_config, start.path, start.wanted, reads_corpora(task))
    datasets = open_datasets(task, config, local_config, tokenizer, start)
    print_rank_0(f"data: the first sample has {_shapes(datasets[0])}")
    source = f"resumes from {start.path}" if start.path else "none, starts from new weights"
    print_rank_0(f"checkpoint: {source}")
    reader = None if start.path is None else CheckpointReader(start.path)
    if reader is not None:
        refuse_contradictions(reader, config, tokenizer.fingerprint, start.wanted)
    iteration, _ = resumed_position(start)
    run_folder.refuse_other_checkpoints(config, run_dir, iteration)
    if reader is not None and start.wanted.position:
        state = TrainState.from_dict(reader.state)
        initial_value = initial_hash(local_config)
        hash_samples(initial_value, state, plain_config(reader), local_config, datasets[0], start.wanted)
    if config.train.eval_tasks:
        read_tasks(config, tokenizer)  # for its errors
    if isinstance(folder, RemotePath):
        print_rank_0(f"note: {folder} is object storage, which the dry run does not write to")
    else:
        _check_writable(folder)
    print_rank_0("the dry run found no mistake")


def _memory(config: Config, resolved: Resolved, ranks: int, device: torch.device) -> list[str]:
    """Return a line for each stage with its layers, parameters and peak memory. Consecutive equal stages share one."""
    if config.model.family is None:
        return ["memory: not estimated for a custom model"]
    accelerated = device.type != "cpu"
    try:
        stages = stages_of(config)
    # A ConfigError is a ValueError, too, but a mistake of the user, which the run would also refuse.
    except ConfigError:
        raise
    except ValueError as error:  # a --partition-method that needs the built model
        return [f"memory: not estimated: {error}"]
    total = format_count(parameters(config))
    lines = [f"{total} parameters; peak memory of a rank on {device.type}, of tensors alone:"]
    first = 0
    previous = ""
    for stage, memory in zip(stages, rank_memory(config, resolved, ranks, accelerated, stages), strict=True):
        size = f"{format_count(stage.count.held)} parameters, {memory.total / 1e9:.3g} GB"
        description = f"{stage.repeated} transformer layers, {size}"
        if description == previous:
            lines[-1] = f"  stages {first} to {stage.number}: {description}"
            continue
        first = stage.number
        previous = description
        lines.append(f"  stage {first}: {description}")
    return lines


def _check_schedule(config: Config) -> None:
    """Check that the schedule of all stages ends. Raises ValueError if it does not."""
    layout = config.parallel
    stages = layout.stages
    if stages == 1:
        return
    settings = {"schedule": layout.pipeline_schedule, "extra_warmup": layout.pipeline_extra_warmup}
    schedule = find_schedule(settings, layout.virtual_pipeline_size)
    micros = config.train.gas
    if micros * stages * layout.virtual_pipeline_size > MAX_INSTRUCTIONS:
        # This many micro-batches fill the pipeline, repeat its steady state and empty it.
        micros = min(micros, 4 * stages)
    try:
        check_plan(make_plan(schedule, stages, micros), micros)
    except ScheduleError as error:
        raise ValueError(f"--pipeline-schedule {layout.pipeline_schedule}: {error}") from None
    print_rank_0(
        f"schedule: {layout.pipeline_schedule}, {config.train.gas:,} micro-batches, ends on all {stages} stages"
    )


def _shapes(dataset: Any) -> str:
    """Return the names and sizes of the tensors in the first sample of a data set."""
    sample = dataset[0]
    if not isinstance(sample, dict):
        return type(sample).__name__
    return ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in sample.items())


def _check_writable(folder: Path) -> None:
    """Write a file to `folder` and remove it, and the folders that did not exist. Raises ValueError if it cannot."""
    # The deepest folder comes first, so that each one is empty when it is removed.
    new_folders = [new_folder for new_folder in (folder, *folder.parents) if not new_folder.exists()]
    probe = folder / f".dry-run-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"0")
        probe.unlink()
        for new_folder in new_folders:
            new_folder.rmdir()
    except OSError as error:
        raise ValueError(f"checkpoints cannot be written to {folder}: {error.strerror}; give another --save") from None
    print_rank_0(f"checkpoints: {folder} is writable")

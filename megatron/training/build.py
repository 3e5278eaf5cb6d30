"""Building of the model and the engine of a task, without data and checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import tds
from tds import optimizer_state as zero_state
from tds.zero3_partition import zero3_partitioner

from .. import mpu
from ..config import Config
from ..config.ds_config import resolve
from ..engines.engine import Engine, PipeEngine
from ..engines.param_groups import assign_groups, muon_settings
from ..optim import build_optimizer
from ..ranks import device as device_module
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.buffers import record_buffers
from ..ranks.initialize import initialize_megatron
from ..timers import Timers
from ..tokenizer import Tokenizer
from .feature import Plan
from .features import Features
from .global_vars import publish
from .model_checks import check_model, send_whole_shards
from .task import Task
from .task_checks import check_task, checked_model

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def start_engine(task: Task, config: Config, tokenizer: Tokenizer | None = None) -> Engine:
    """Initialize torch.distributed, and return the engine of `task` for a custom training loop.

    tokenizer: passed through `task.extended`; required only if the model or the batches of the task use it.
    """
    check_task(task, "model", "batch")
    device = initialize_megatron(config)
    timers = Timers(device)
    resolved = resolve(config, dist.get_world_size(), device_module.has_fast_bf16(device))
    publish(config, tokenizer, timers, resolved.precision)
    plan = Plan(task, config, resolved, device, tokenizer)
    return build_engine(build_model(plan), plan, Features(config), timers)


def build_model(plan: Plan) -> nn.Module:
    """Build the model of the task. If a rank fails, every rank raises RunError.

    The initial weights do not depend on the numbers of data-, tensor- and pipeline-parallel ranks: `init_weights` draws
    those of declared parameters from (seed, name). `seeded_layers` is for layers that draw their values themselves.

    With ZeRO 3, each layer of `megatron.model` is partitioned over the ranks as soon as it is built. So no rank ever
    holds the whole model.
    """
    partition = zero3_partitioner(plan.resolved.deepspeed, mpu, DTYPES[plan.resolved.precision])
    with raise_on_all_ranks(), tds.pipe.seeded_layers(plan.config.train.seed), mpu.after_each_layer(partition):
        model = checked_model(plan.task, plan.config, plan.tokenizer)
        send_whole_shards(model)  # with sequence parallelism, each rank sends its whole shard to the next stage
    if partition is not None:  # ZeRO 3
        # Also the user's own modules outside the layers: DeepSpeed casts and moves all parameters of a model or none.
        partition(model)
    return model


def build_engine(
    model: nn.Module, plan: Plan, features: Features, timers: Timers, lags: Mapping[str, int] | None = None
) -> Engine:
    """Return the engine for `model`: tds' pipeline engine for a PipelineModule, DeepSpeed's engine otherwise.

    lags: `step_lags` of the checkpoint that will be loaded.
    """
    task = plan.task
    config = plan.config
    resolved = plan.resolved
    for feature in features:
        feature.model(model, plan)
    with raise_on_all_ranks():
        check_model(model, task, config)
    is_pipeline = tds.pipe.is_pipeline(model)
    # `check_model` accepts a plain module with --pipe-parallel-size 1. It is trained as without a pipeline.
    if not is_pipeline and config.parallel.pipe_parallel_size:
        config = replace(config, parallel=replace(config.parallel, pipe_parallel_size=0))
        resolved = resolve(config, dist.get_world_size(), device_module.has_fast_bf16(plan.device))

    muon = muon_settings(model, config, resolved) if config.optim.optimizer == "muon" else {}
    groups = assign_groups(model, config, resolved, lags or {})
    optimizer = build_optimizer(groups, config.optim, config.model.kernels, **muon, width=config.model.width_factor)
    if resolved.distributed_optimizer:
        optimizer = tds.DistributedOptimizer(optimizer, overlap_gather=config.parallel.overlap_param_gather)

    # The other results are for DeepSpeed's own data loader and learning-rate schedule, which no run uses.
    engine, *_ = tds.initialize(
        model=model, optimizer=optimizer, config=resolved.deepspeed, mpu=None if is_pipeline else mpu
    )
    for feature in features:
        feature.engine(engine, plan)
    if resolved.precision == "fp64":
        zero_state.use_fp64(engine)
    record_buffers(engine.module)
    # DeepSpeed's optimizers must skip a step even if only one copy of a weight has a NaN in its gradient.
    if mpu.get_mesh().replica.size > 1 and not resolved.distributed_optimizer:
        zero_state.check_all_copies(engine)

    # Raises for a batch size with which the pipeline schedule cannot run: now, not in the middle of the run.
    samples_per_micro_batch = config.train.batch_size * mpu.get_topology().replicas
    for global_batch_size in config.batch_schedule(dist.get_world_size()).sizes:
        engine.set_micro_batches(global_batch_size // samples_per_micro_batch)
    engine.set_micro_batches(config.train.gas)  # of the first step

    batch_fn = partial(task.checked_batch, config=config, tokenizer=plan.tokenizer)
    if not is_pipeline:
        from ..engines.without_pipeline import NoPipeEngine

        return NoPipeEngine(engine, resolved, config.train.gas, task, batch_fn, timers)
    if not hasattr(model, "_megatron_batch_fn"):  # a function of the user's model that makes the batches
        engine.set_batch_fn(batch_fn)
    return PipeEngine(engine, timers, resolved.wall_clock_breakdown)

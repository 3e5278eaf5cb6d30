"""Startup of the ranks, the model and the engine of a task, without data and checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import tds
from tds import optimizer_state as zero_state
from tds.zero3_partition import zero3_partitioner

from .. import mpu
from ..config import Config
from ..config.ds_config import Resolved, resolve
from ..engines.engine import Engine
from ..engines.param_groups import keys_of_groups
from ..engines.with_pipeline import PipeEngine
from ..model.layers import global_parameters
from ..model.muon_parameters import muon_parameters
from ..optim import build_optimizer
from ..ranks import device as device_module
from ..ranks.agreement import all_ranks
from ..ranks.buffers import remember
from ..ranks.initialize import initialize_megatron
from ..ranks.objects import gather_objects
from ..timers import Timers
from ..tokenizer import Tokenizer
from .feature import Plan
from .features import Features
from .global_vars import publish
from .task import Task, check_task, checked_model

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def start_engine(task: Task, config: Config, tokenizer: Tokenizer | None = None) -> Engine:
    """Initialize torch.distributed, and return the engine of `task` for a custom training loop.

    tokenizer: required only if the model or the batches of the task use it.
    """
    check_task(task, "model", "batch")
    device = initialize_megatron(config)
    timers = Timers(device)
    publish(config, tokenizer, timers)
    resolved = resolve(config, dist.get_world_size(), device_module.fast_bf16(device))
    plan = Plan(task, config, resolved, device, tokenizer)
    return build_engine(build_model(plan), plan, Features(config), timers)


def build_model(plan: Plan) -> nn.Module:
    """Build the model of the task. If a rank fails, every rank raises RunError.

    The initial weights do not depend on the numbers of data-, tensor- and pipeline-parallel ranks: `init_weights` draws
    those of declared parameters from (seed, name). `seeded_layers` is for layers that draw their values themselves.

    With ZeRO 3, each layer of `megatron.model` is partitioned over the ranks as soon as it is built. So no rank ever
    holds the whole model.
    """
    cut = zero3_partitioner(plan.resolved.deepspeed, mpu, DTYPES[plan.resolved.precision])
    with all_ranks(), tds.pipe.seeded_layers(plan.config.train.seed), mpu.after_each_layer(cut):
        model = checked_model(plan.task, plan.config, plan.tokenizer)
    if cut is not None:
        # The user's own modules outside the layers of megatron.model must be partitioned, too: DeepSpeed casts and
        # moves either all parameters of a model or none.
        cut(model)
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
    for each in features:
        each.model(model, plan)
    with all_ranks():
        pipeline = _checked(model, task, config)
    if not pipeline and config.parallel.pipe_parallel_size:  # --pipe-parallel-size is 1, which permits a plain module
        config = replace(config, parallel=replace(config.parallel, pipe_parallel_size=0))
        resolved = resolve(config, dist.get_world_size(), device_module.fast_bf16(device_module.current()))
    muon = _muon(model, config, resolved) if config.optim.optimizer == "muon" else {}
    keys = keys_of_groups(model, config, resolved, lags or {})
    optimizer = build_optimizer(keys, config.optim, config.model.kernels, **muon, width=config.model.width_factor)
    if resolved.distributed_optimizer:
        optimizer = tds.DistributedOptimizer(optimizer, overlap_gather=config.parallel.overlap_param_gather)
    engine, *_ = tds.initialize(
        model=model, optimizer=optimizer, config=resolved.deepspeed, mpu=None if pipeline else mpu
    )
    for each in features:
        each.engine(engine, plan)
    remember(engine.module)
    if resolved.precision == "fp64":
        zero_state.use_fp64(engine)
    if mpu.get_mesh().replica.size > 1 and not resolved.distributed_optimizer:
        zero_state.check_all_copies(engine)
    batch_fn = partial(task.checked_batch, config=config, tokenizer=plan.tokenizer)
    unit = config.train.batch_size * mpu.get_mesh().share.of
    for size in config.batches(dist.get_world_size()).sizes:
        engine.set_micro_batches(size // unit)  # refuses now a pipeline schedule that cannot run with this number
    engine.set_micro_batches(config.train.gas)
    if not pipeline:
        from ..engines.without_pipeline import NoPipeEngine

        return NoPipeEngine(engine, resolved, config.train.gas, task, batch_fn, timers)
    if not hasattr(model, "_megatron_batch_fn"):
        engine.set_batch_fn(batch_fn)
    return PipeEngine(engine, timers, resolved.wall_clock_breakdown)


def _muon(model: nn.Module, config: Config, resolved: Resolved) -> dict[str, Any]:
    """Return the arguments of `build_optimizer` that only Muon needs. Raises RunError if it has no matrix."""
    hidden = muon_parameters(model)
    somewhere = any(gather_objects(bool(hidden)))
    with all_ranks():
        if not somewhere:
            raise ValueError(
                "--optimizer muon: no matrix is trained in a transformer layer of megatron.model; set use_muon = True "
                "on the weights that are hidden matrices, or use --optimizer adam"
            )
    name = config.optim.muon_ns_dtype
    if name == "auto":
        name = "bf16" if resolved.precision == "bf16" else "none"
    return {"hidden": hidden, "ns_dtype": DTYPES.get(name)}


def _checked(model: nn.Module, task: Task, config: Config) -> bool:
    """Return True if `model` is a PipelineModule. Raises ValueError if it does not fit the task or the settings."""
    refuse_what_no_checkpoint_holds(model)
    contexts = mpu.context_axis().size
    if contexts > 1 and not task.shares_out_tokens:
        raise ValueError(
            f"--context-parallel-size {contexts}: {type(task).__name__} does not shard samples over context-parallel "
            "ranks (the tasks of GPT-2 and Llama do); leave the flag out"
        )
    pipeline = _is_pipeline(model, config)
    if pipeline and not hasattr(model, "_megatron_batch_fn"):
        counts = getattr(cast(Any, model).loss_fn, "count_targets", None) is not None
        if not task.makes_batches:
            raise ValueError(
                "no function makes the batches of the PipelineModule: set model._megatron_batch_fn to a function that "
                "returns ((inputs of the first layer), (targets of loss_fn))"
            )
        if counts != (task.count_targets is not None):
            raise ValueError(
                f"set count_targets in both {type(task).__name__} and the loss_fn of its PipelineModule, or set it to "
                "None in both: with count_targets, a loss is the sum over targets; without it, the mean"
            )
    return pipeline


def refuse_what_no_checkpoint_holds(model: nn.Module) -> None:
    """Raise ValueError for a shard whose place in the whole weight is unknown."""
    for name, parameter in global_parameters(model):
        unknown = mpu.is_split(parameter) and mpu.spec_of(parameter).dim is None
        if unknown and mpu.get_mesh().model.size > 1:
            raise ValueError(
                f"the parameter {name} is marked as sharded over tensor-parallel ranks, but not along which dimension, "
                "so no checkpoint can store it: call mpu.declare(weight, init, dim=0) where it is made"
            )


def _is_pipeline(model: nn.Module, config: Config) -> bool:
    """Return True if `model` is a PipelineModule of tds or DeepSpeed.

    Raises ValueError if the model contradicts --pipe-parallel-size or --model-parallel-size.
    """
    pipeline = tds.pipe.is_pipeline(model)
    wanted = config.parallel.pipe_parallel_size
    if pipeline and (wanted == 0 or model.num_stages != config.parallel.stages):
        raise ValueError(
            f"the model is a PipelineModule of {model.num_stages} stages, but --pipe-parallel-size is {wanted}: "
            f"build it with topology=mpu.get_topology(); for --pipe-parallel-size 0, build a plain module"
        )
    ranks = mpu.get_mesh().model.size
    topology = cast(Any, model).topology if pipeline else None
    if topology and max(topology().get_dim("model"), 1) != ranks:
        raise ValueError(
            f"the model is a PipelineModule whose topology does not match --model-parallel-size {ranks}: build it "
            f"with topology=mpu.get_topology(), not num_stages"
        )
    if not pipeline and wanted > 1:
        raise ValueError(
            f"--pipe-parallel-size is {wanted}, but the model is a {type(model).__name__}, not a PipelineModule: "
            f"build a PipelineModule from a list of layers, or pass --pipe-parallel-size 0"
        )
    return pipeline

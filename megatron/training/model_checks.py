"""Checks that the model of a task fits the task and the settings, before the engine gets it."""

from dataclasses import replace
from typing import Any, cast

from torch import nn

import tds
from tds.boundary import Boundary

from .. import mpu
from ..config import Config
from ..model.layers import global_parameters
from .task import Task


def check_model(model: nn.Module, task: Task, config: Config) -> None:
    """Raise ValueError if `model` does not fit the task or the settings."""
    check_declared_shards(model)
    refuse_unstorable_weights(model)
    context_ranks = mpu.context_axis().size
    if context_ranks > 1 and not task.shares_out_tokens:
        raise ValueError(
            f"--context-parallel-size {context_ranks}: {type(task).__name__} does not shard samples over "
            "context-parallel ranks (the tasks of GPT-2 and Llama do); leave the flag out"
        )
    if not _is_pipeline(model, config) or hasattr(model, "_megatron_batch_fn"):
        return
    # The task must make the batches of such a PipelineModule, and `loss_fn` computes its loss.
    if not task.makes_batches:
        raise ValueError(
            "no function makes the batches of the PipelineModule: set model._megatron_batch_fn to a function that "
            "returns ((inputs of the first layer), (targets of loss_fn))"
        )
    loss_fn_counts = getattr(cast(Any, model).loss_fn, "count_targets", None) is not None
    if loss_fn_counts != (task.count_targets is not None):
        raise ValueError(
            f"set count_targets in both {type(task).__name__} and the loss_fn of its PipelineModule, or set it to "
            "None in both: with count_targets, a loss is the sum over targets; without it, the mean"
        )


def check_declared_shards(model: nn.Module) -> None:
    """Raise ValueError for a shard whose place in the whole weight is unknown."""
    for name, parameter in global_parameters(model):
        is_undeclared = mpu.is_split(parameter) and mpu.spec_of(parameter).dim is None
        if is_undeclared and mpu.get_mesh().model.size > 1:
            raise ValueError(
                f"the parameter {name} is marked as sharded over tensor-parallel ranks, but not along which dimension, "
                "so no checkpoint can store it: call mpu.declare(weight, init, dim=0) where it is made"
            )


def refuse_unstorable_weights(model: nn.Module) -> None:
    """Raise ValueError for a complex weight, trained or frozen, as checkpoints store real numbers only."""
    for name, parameter in global_parameters(model):
        if parameter.is_complex():
            raise ValueError(
                f"the parameter {name} is {parameter.dtype}, which no checkpoint can store: give it another dtype, for "
                "example real numbers [..., 2] instead of complex ones, with torch.view_as_complex() in forward()"
            )


def send_whole_shards(model: nn.Module) -> None:
    """With sequence parallelism, let each tensor-parallel rank send all of what it has to the next stage.

    Each of these ranks then holds another shard of the sequence. A declaration that a tensor is equal on all of them
    would let each rank send a slice of its shard, and the next stage would get a mixture of the shards.
    """
    if mpu.sequence_axis().size == 1:
        return
    # `boundaries` and `receives` declare a stage's outputs and inputs for tds. `_input_pipe_partitioned` is the list of
    # their `split` flags in models for CPM-Pretrain's TDS.
    for name in ("boundaries", "receives", "_input_pipe_partitioned"):
        declared = getattr(model, name, None)
        if declared is not None:
            setattr(model, name, _unsplit(declared))


def _unsplit(declared: Any) -> Any:
    """Return a declaration, or sequences of declarations, without the flags `split`."""
    if isinstance(declared, Boundary):
        return replace(declared, split=False)
    if isinstance(declared, int):  # True or False, an item of `_input_pipe_partitioned`
        return False
    # None stands for no declaration. All else is a sequence, such as the boundaries of a stage.
    return None if declared is None else tuple(map(_unsplit, declared))


def _is_pipeline(model: nn.Module, config: Config) -> bool:
    """Return True if `model` is a PipelineModule of tds or DeepSpeed.

    Raises ValueError if the model contradicts --pipe-parallel-size or --model-parallel-size.
    """
    is_pipeline = tds.pipe.is_pipeline(model)
    pipe_size = config.parallel.pipe_parallel_size
    if is_pipeline and (pipe_size == 0 or model.num_stages != config.parallel.stages):
        raise ValueError(
            f"the model is a PipelineModule of {model.num_stages} stages, but --pipe-parallel-size is {pipe_size}: "
            f"build it with topology=mpu.get_topology(); for --pipe-parallel-size 0, build a plain module"
        )
    ranks = mpu.get_mesh().model.size
    # get_dim() returns 0 for an axis that the topology does not have.
    if is_pipeline and max(cast(Any, model).topology().get_dim("model"), 1) != ranks:
        raise ValueError(
            f"the model is a PipelineModule whose topology does not match --model-parallel-size {ranks}: build it "
            f"with topology=mpu.get_topology(), not num_stages"
        )
    if not is_pipeline and pipe_size > 1:
        raise ValueError(
            f"--pipe-parallel-size is {pipe_size}, but the model is a {type(model).__name__}, not a PipelineModule: "
            f"build a PipelineModule from a list of layers, or pass --pipe-parallel-size 0"
        )
    return is_pipeline

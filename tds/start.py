"""Checks before the first step: invalid settings, and stages that do not fit together."""

import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ._torch import keep_saved_tensors
from .boundary import Contract, check_match, read_contract
from .deadlocks import Rules
from .distributed_optimizer import DistributedOptimizer
from .groups import gather_objects
from .messages import error_text, setting_advice
from .queues import has_message_queues, receives_ahead
from .schedule import Backward, BackwardInput, Plan, Schedule, ScheduleError, find_schedule, forward_only, make_plan
from .timetable import check_plan

DEEPSPEEDS_SETTINGS = "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned"
# Types of the settings in the section "pipeline" of a ds_config.
PIPELINE_SETTINGS: dict[str, Any] = {
    "schedule": str,
    "extra_warmup": int,
    "timeout": int | float,
    "overlap_grad_reduce": bool,
    "use_reentrant": bool,
    **dict.fromkeys(DEEPSPEEDS_SETTINGS.split(), object),
}


def checked_schedule(engine: Any) -> Schedule:
    """Return the schedule that the section "pipeline" of the ds_config of `engine` names.

    Raises ValueError for invalid settings.
    """
    settings = engine._config.pipeline
    for key, value in settings.items():
        # No value is an instance of (), so an unknown key is refused like a value of the wrong type.
        if not isinstance(value, PIPELINE_SETTINGS.get(key, ())):
            raise ValueError(
                f'"pipeline" in the ds_config has {key!r}: {value!r}; its settings are {PIPELINE_SETTINGS}'
            )
    _refuse_settings(engine)
    schedule = find_schedule(settings, engine._chunks)
    prove_no_deadlock(schedule, engine)
    return schedule


def raise_if_any_failed(error: Exception | None) -> None:
    """Raise ValueError if another rank failed to build its layers. Collective, so that no rank waits for a failed rank.

    error: this rank's error, or None. The function does not raise this error; the caller must raise it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    message = None  # None for a rank that has not failed
    if error is not None:
        message = error_text(error) or type(error).__name__  # never empty
    for rank, other_message in enumerate(gather_objects(message)):
        if other_message and error is None:
            raise ValueError(f"rank {rank} could not build its layers: {other_message}")


def prove_no_deadlock(schedule: Schedule, engine: Any) -> None:
    """Raise ScheduleError unless training and evaluation provably end, without a deadlock, on this device.

    The proof holds for the engine's present number of micro-batches. Raises ValueError if a schedule that splits
    backward passes runs with activation checkpointing.
    """
    # The streams of a device may share hardware queues, and its host may have to synchronize it.
    has_queues = has_message_queues(engine.device)
    rules = Rules(
        ahead=receives_ahead(engine.device),
        one_hardware_queue=has_queues,
        dynamic=engine.dynamic_shape,
        device_waits=has_queues,
    )
    stages = engine.num_stages
    micros = engine.micro_batches
    plan = make_plan(schedule, stages, micros)
    kinds = set(map(type, plan[0]))
    if kinds.isdisjoint((Backward, BackwardInput)):
        raise ScheduleError("the schedule has no backward pass, so nothing would be learned")
    if BackwardInput in kinds:
        if engine.module.activation_checkpoint_interval > 0:
            raise ValueError(
                f"the schedule {engine._config.pipeline.get('schedule')} would recompute activations twice, once for "
                "each half of the backward pass: use 1f1b, or leave activation checkpointing out"
            )
        keep_saved_tensors()  # both halves of a backward pass read them
    # The plan of training, then that of evaluation.
    _check_for_deadlocks(plan, micros, rules)
    _check_for_deadlocks(make_plan(partial(forward_only, chunks=engine._chunks), stages, micros), micros, rules)


def _check_for_deadlocks(plan: Plan, micros: int, rules: Rules) -> None:
    """Raise ScheduleError if a plan may deadlock; if only dynamic_shape causes this, the message gives advice."""
    try:
        check_plan(plan, micros, rules)
    except ScheduleError as error:
        if rules.dynamic:
            check_plan(plan, micros, rules._replace(dynamic=False))  # raises its own error if there is another cause
            raise ScheduleError(f"{error}. The cause is dynamic_shape. Use another schedule than interleaved") from None
        raise


def _refuse_settings(engine: Any) -> None:
    """Raise ValueError for settings that would compute wrong numbers, hang or have no effect; for profilers, warn."""
    config = engine._config
    for profiler in ("flops_profiler", "comms_logger"):
        if config._param_dict.get(profiler, {}).get("enabled") and not engine.global_rank:
            warnings.warn(f"{profiler} records no training step of a pipeline: use torch.profiler", stacklevel=4)
    # Without an optimizer, such as for evaluation, there is no gradient norm.
    if engine.fp16_enabled() and not engine.zero_optimization() and engine.optimizer:
        raise ValueError(
            "fp16 under a pipeline needs ZeRO stage 1 (without ZeRO, DeepSpeed computes a wrong gradient norm): "
            'set "zero_optimization": {"stage": 1}'
        )
    if config.pipeline.get("schedule") == "interleaved" and engine._chunks == 1 and engine.num_stages > 1:
        raise ValueError("the schedule interleaved needs several chunks a stage: tds.PipelineModule(..., chunks=2)")
    if engine.num_stages > 1 and engine.device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING=1 would deadlock the pipeline, because two stages would each wait for a message "
            f"before they send theirs: unset the variable, or debug without a pipeline "
            f"({setting_advice['no pipeline']})"
        )
    if config.torch_autocast_enabled and config.torch_autocast_dtype == torch.float16:
        raise ValueError(
            "torch_autocast with float16 under a pipeline would scale the loss of each stage separately: "
            'set "torch_autocast": {"dtype": "bfloat16"}, or "fp16": {"enabled": true} with ZeRO stage 1'
        )
    module = engine.module
    depends_on_state = config.torch_autocast_enabled or module.seed_layers
    if depends_on_state and module.activation_checkpoint_interval and not hasattr(module, "chunks"):
        raise ValueError(
            "DeepSpeed's PipelineModule recomputes layers without torch_autocast, and under seed_layers with the same "
            "seeds in each group of layers: use tds.PipelineModule, or leave activation_checkpoint_interval out"
        )


def refuse_idle_stages(model: Any = None, config_class: Any = None, optimizer: Any = None, **_: Any) -> None:
    """Raise ValueError, on all ranks, if a stage has nothing to train under ZeRO or half precision.

    Also raise ValueError if stages differ in their number of parameter groups: ZeRO computes the gradient norm with one
    all-reduce over the stages per group, and would hang. Call this function before an engine is made.
    """
    if config_class is None or not dist.is_initialized():
        return
    bf16 = config_class.bfloat16_config.enabled
    if not (config_class.zero_optimization_stage or config_class.float16_config.enabled or bf16):
        return
    if isinstance(optimizer, DistributedOptimizer):
        return  # a DistributedOptimizer supports stages without trainable weights

    # An engine without an optimizer only evaluates, so its stages need no trainable weights.
    only_evaluates = not optimizer and not config_class.optimizer_name
    is_trainable = only_evaluates or any(p.requires_grad for p in model.parameters())
    num_groups = len(getattr(optimizer, "param_groups", ()))
    stages = gather_objects((is_trainable, num_groups))  # of each rank
    counts = [count for _, count in stages]
    fewest = min(counts)
    if fewest < max(counts) and not bf16:  # DeepSpeed's bf16 optimizer computes the norm of all groups at once
        raise ValueError(
            f"the stage of rank {counts.index(fewest)} has weights for {fewest} of the optimizer's {max(counts)} "
            f"parameter groups, but ZeRO needs all groups on each stage: cut the layers differently "
            f"(partition_method), or train in bf16 or without ZeRO"
        )
    for rank, (rank_is_trainable, _) in enumerate(stages):
        if not rank_is_trainable:
            raise ValueError(
                f"the stage of rank {rank} has no trainable weight, but DeepSpeed's ZeRO and half precision need one: "
                f"cut the layers so that each stage has one (partition_method), or train in fp32 without ZeRO"
            )


def exchange_declarations(engine: Any) -> Contract:
    """Exchange the boundary declarations of all stages, and warn of weights that stages share without a tie.

    Raises BoundaryError on every rank if the declarations do not match.
    """
    settings = engine._config.pipeline
    chunks = engine._chunks
    shared = {
        "schedule": settings.get("schedule"),
        "extra_warmup": settings.get("extra_warmup"),
        "gradient_accumulation_steps": engine.micro_batches,
        "gradient_clipping": engine.gradient_clipping(),
        "cuts of the layers": engine.module.parts,  # DeepSpeed's name for the first layer of each group of layers
        "chunks": chunks,
        "dynamic_shape": engine.dynamic_shape,
    }
    contract = read_contract(engine.module, chunks, shared)
    if engine.num_stages > 1:
        from .untied import warn_of_untied  # a single stage does not need it

        stages = engine.grid.get_pipe_parallel_group()
        check_match(gather_objects(contract, stages))
        warn_of_untied(engine.module, stages)
    return contract

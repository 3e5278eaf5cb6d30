"""Settings of a run that depend on the flags, on DeepSpeed's JSON file and on the device.

A contradiction between file and flags is an error. If a key is absent or "auto", the flag decides.
"""

from dataclasses import dataclass
from typing import Any

import tds

from .conflicts import compile_conflicts, own_reduction_conflicts, zero_conflicts
from .ds_file import (
    PASSED_KEYS,
    REDUCTION_KEYS,
    batch_sizes,
    enabled_formats,
    offloaded_part,
    read_file,
    reconcile_values,
)
from .fields import raise_first_problem
from .param_groups import ParamRule, read_param_rules
from .sections import Config

__all__ = ["Resolved", "batch_sizes", "enabled_formats", "offloaded_part", "read_file", "resolve"]


@dataclass(frozen=True)
class Resolved:
    """Settings of a run after reconciling DeepSpeed's JSON file with the flags."""

    deepspeed: dict[str, Any]  # configuration for `tds.initialize`
    precision: str  # number format of weights and activations; this is bf16 with --precision fp8
    zero_stage: int
    clip_grad: float
    log_interval: int
    wall_clock_breakdown: bool
    overlap_grad_reduce: bool  # without ZeRO: tds' GradReducer, instead of DeepSpeed, all-reduces gradients
    distributed_optimizer: bool  # ZeRO 1: use tds' DistributedOptimizer instead of DeepSpeed's optimizer
    notes: tuple[str, ...] = ()  # notes for the user, on values in the file that flags override
    param_rules: tuple[ParamRule, ...] = ()  # rules of --param-groups


def resolve(config: Config, world_size: int, fast_bf16: bool) -> Resolved:
    """Read `--deepspeed-config` and reconcile it with the flags.

    fast_bf16: whether `--precision auto` selects bf16 if the file specifies no precision.
    Raises ConfigError for an unknown key, and for a contradiction; the message then shows both values.
    """
    content = read_file(config, tds.complaint)
    file_values = reconcile_values(config, content, world_size)
    # For each setting, the flag comes first, then the file, then the default.
    precision = config.train.dtype
    if precision == "auto":
        precision = file_values.precision or ("bf16" if fast_bf16 else "fp32")
    default_stage = 1 if precision in ("fp16", "bf16") else 0  # stage 1 keeps fp32 master weights
    zero_stage = int(_first_given(config.parallel.zero_stage, file_values.zero_stage, default_stage))
    raise_first_problem(zero_conflicts(config, precision, zero_stage))
    if config.train.compile:
        raise_first_problem(compile_conflicts(config, zero_stage))
    clip_grad = float(_first_given(config.optim.clip_grad, file_values.clip_grad, 1.0))
    notes = list(file_values.notes)
    zero1_keys = set()
    if content:
        from .ds_notes import keys_read_by_zero1, notes_on_keys

        notes += notes_on_keys(config, content, precision, zero_stage)
        zero1_keys = keys_read_by_zero1(content, precision, zero_stage)
    # Either tds reduces gradients over the replicas, during the backward pass, or DeepSpeed does. It is DeepSpeed if
    # --no-overlap-grad-reduce is given, or if the file configures the reduction.
    tds_may_reduce = config.parallel.overlap_grad_reduce and REDUCTION_KEYS.isdisjoint(content)
    # tds' ZeRO 1 reads only the keys zero_optimization.stage and bf16.enabled. If the file sets other keys of these two
    # sections, use DeepSpeed's ZeRO 1. DeepSpeed also has the dynamic loss scale of fp16.
    own_zero1 = tds_may_reduce and zero_stage == 1 and precision in ("fp32", "bf16") and not zero1_keys
    # Without ZeRO, tds reduces in fp32 or fp64, as `zero_conflicts` has refused fp16 and bf16.
    own_reduction = tds_may_reduce and zero_stage == 0
    raise_first_problem(own_reduction_conflicts(config, zero_stage, own_zero1, own_reduction))
    rules_file = config.optim.param_groups
    param_rules = () if rules_file is None else read_param_rules(rules_file)
    return Resolved(
        deepspeed=_deepspeed_config(config, content, world_size, precision, zero_stage, clip_grad),
        precision=precision,
        zero_stage=zero_stage,
        clip_grad=clip_grad,
        log_interval=int(_first_given(config.log.log_interval, file_values.log_interval, 10)),
        wall_clock_breakdown=bool(content.get("wall_clock_breakdown", False)),
        # A pipeline engine chooses who reduces gradients.
        overlap_grad_reduce=own_reduction and config.parallel.pipe_parallel_size == 0,
        distributed_optimizer=own_zero1,
        notes=tuple(notes),
        param_rules=param_rules,
    )


def _first_given(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _deepspeed_config(
    config: Config, content: dict[str, Any], world_size: int, precision: str, zero_stage: int, clip_grad: float
) -> dict[str, Any]:
    """Return the configuration for `tds.initialize`. content: content of the file."""
    p = config.parallel
    ds = {key: content[key] for key in PASSED_KEYS if key in content}
    ds |= batch_sizes(config, world_size)
    ds["zero_optimization"] = {**content.get("zero_optimization", {}), "stage": zero_stage}
    # DeepSpeed counts every copy of the weights as a replica, including those of context-parallel ranks.
    ds["train_batch_size"] *= p.context_parallel_size
    ds["pipeline"] = {
        "schedule": p.pipeline_schedule,
        "extra_warmup": p.pipeline_extra_warmup,
        "timeout": p.pipeline_timeout,
        "overlap_grad_reduce": p.overlap_grad_reduce,
    }
    # Otherwise, DeepSpeed refuses ZeRO with optimizers that are not on its own list.
    ds.setdefault("zero_allow_untested_optimizer", True)
    # CPU offload uses torch's fused AdamW. It is vectorised like DeepSpeed's CPU Adam, but needs no compiler.
    ds.setdefault("zero_force_ds_cpu_optimizer", False)
    # training/log.py prints the progress lines. DeepSpeed's logger, which would print its own lines, is kept quiet.
    ds["steps_per_print"] = 10**9
    # Without ZeRO and pipeline, engines/without_pipeline.py clips, as DeepSpeed would not report the gradient norm.
    clips_itself = zero_stage == 0 and p.pipe_parallel_size == 0
    ds["gradient_clipping"] = 0.0 if clips_itself else clip_grad
    if precision in ("fp16", "bf16"):
        ds[precision] = {**content.get(precision, {}), "enabled": True}
    if precision == "bf16":
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
        # Add each bf16 gradient to its fp32 sum at once and free it. DeepSpeed's default keeps it until the pass ends.
        ds["bf16"].setdefault("immediate_grad_update", True)
        if zero_stage <= 1:  # without this key, DeepSpeed would reduce these fp32 sums between replicas in bf16
            ds.setdefault("communication_data_type", "fp32")
    return ds

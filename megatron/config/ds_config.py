"""Settings of a run that depend on the flags, on DeepSpeed's JSON file and on the device.

A contradiction between file and flags is an error. If a key is absent or "auto", the flag decides.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tds

from .conflicts import conflicts_with_compile, misfits_of_zero, needs_own_reduction
from .ds_file import PASSED_ON, REDUCES, batch_sizes, read_file, values_of
from .fields import refuse
from .sections import Config

if TYPE_CHECKING:
    from .param_groups import ParamRule


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
    param_rules: "tuple[ParamRule, ...]" = ()  # rules of --param-groups


def resolve(config: Config, world_size: int, fast_bf16: bool) -> Resolved:
    """Read `--deepspeed-config` and reconcile it with the flags.

    fast_bf16: whether `--precision auto` selects bf16 if the file specifies no precision.
    Raises ConfigError for an unknown key, and for a contradiction; the message then shows both values.
    """
    given = read_file(config, tds.complaint)
    file = values_of(config, given, world_size)
    precision = config.train.dtype
    if precision == "auto":
        precision = file.precision or ("bf16" if fast_bf16 else "fp32")
    least = 1 if precision in ("fp16", "bf16") else 0
    zero = int(_first(config.parallel.zero_stage, file.zero_stage, least))
    refuse(misfits_of_zero(config, precision, zero))
    if config.train.compile:
        refuse(conflicts_with_compile(config, zero))
    clip = float(_first(config.optim.clip_grad, file.clip_grad, 1.0))
    notes = list(file.notes)
    # tds' ZeRO 1 reads only the keys zero_optimization.stage and bf16.enabled. If the file sets other keys of these two
    # sections, use DeepSpeed's ZeRO 1.
    for_zero: set[str] = set()
    if given:
        from .ds_notes import keys_for_zero, notes_on_keys

        notes += notes_on_keys(config, given, precision, zero)
        for_zero = keys_for_zero(given, precision, zero)
    overlaps = config.parallel.overlap_grad_reduce and not REDUCES & given.keys()
    own = overlaps and zero == 1 and precision in ("fp32", "bf16") and not for_zero
    plain = overlaps and zero == 0 and precision in ("fp32", "fp64")
    refuse(needs_own_reduction(config, zero, own, plain))
    return Resolved(
        deepspeed=_for_deepspeed(config, given, world_size, precision, zero, clip),
        precision=precision,
        zero_stage=zero,
        clip_grad=clip,
        log_interval=int(_first(config.log.log_interval, file.log_interval, 10)),
        wall_clock_breakdown=bool(given.get("wall_clock_breakdown", False)),
        overlap_grad_reduce=overlaps and zero == 0 and config.parallel.pipe_parallel_size == 0,
        distributed_optimizer=own,
        notes=tuple(notes),
        param_rules=_param_rules(config.optim.param_groups),
    )


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


def _param_rules(path: str | None) -> "tuple[ParamRule, ...]":
    if path is None:
        return ()
    from .param_groups import read_param_rules

    return read_param_rules(path)


def _for_deepspeed(
    config: Config, given: dict[str, Any], world_size: int, precision: str, zero: int, clip: float
) -> dict[str, Any]:
    """Return the configuration for `tds.initialize`. given: content of the file."""
    p = config.parallel
    ds = {key: given[key] for key in PASSED_ON if key in given}
    ds |= batch_sizes(config, world_size)
    ds["zero_optimization"] = {**given.get("zero_optimization", {}), "stage": zero}
    # DeepSpeed counts every copy of the weights as a replica, including those of context-parallel ranks.
    ds["train_batch_size"] *= p.context_parallel_size
    ds["pipeline"] = {
        "schedule": p.pipeline_schedule,
        "extra_warmup": p.pipeline_extra_warmup,
        "timeout": p.pipeline_timeout,
        "overlap_grad_reduce": p.overlap_grad_reduce,
    }
    ds.setdefault("zero_allow_untested_optimizer", True)
    # CPU offload uses torch's fused AdamW. It is vectorised like DeepSpeed's CPU Adam, but needs no compiler.
    ds.setdefault("zero_force_ds_cpu_optimizer", False)
    # training/log.py prints the progress lines. DeepSpeed's logger, which would print its own lines, is kept quiet.
    ds["steps_per_print"] = 10**9
    # Without ZeRO and pipeline, engines/without_pipeline.py clips, as DeepSpeed would not report the gradient norm.
    is_plain = zero == 0 and p.pipe_parallel_size == 0
    ds["gradient_clipping"] = 0.0 if is_plain else clip
    if precision in ("fp16", "bf16"):
        ds[precision] = {**given.get(precision, {}), "enabled": True}
    if precision == "bf16":
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
        # Add each bf16 gradient to its fp32 sum at once and free it. DeepSpeed's default keeps it until the pass ends.
        ds["bf16"].setdefault("immediate_grad_update", True)
        if zero <= 1:  # without this key, DeepSpeed would reduce these fp32 sums between replicas in bf16
            ds.setdefault("communication_data_type", "fp32")
    return ds

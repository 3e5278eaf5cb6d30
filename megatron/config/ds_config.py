"""Reconciliation of DeepSpeed's JSON file with the flags. A contradiction between the two is an error.

If a key is absent or "auto", the flag decides. A key that would have no effect is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tds

from .conflicts import conflicts_with_compile
from .ds_file import PASSED_ON, REDUCES, read_file
from .fields import ConfigError, refuse
from .reductions import needs_own_reduction
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
    path = config.train.deepspeed_config or "ds_config"
    sizes, notes = _batch_sizes(config, given, path, world_size)
    precision = _precision(config, given, path, fast_bf16)
    zero = _zero_stage(config, given, path, precision)
    if config.train.compile:
        refuse(conflicts_with_compile(config, zero))
    clip = float(_agree("gradient_clipping", given, "--clip-grad", config.optim.clip_grad, 1.0, path))
    log_interval = _log_interval(config, given, path, notes)
    # tds' ZeRO 1 reads only the keys zero_optimization.stage and bf16.enabled. If the file sets other keys of these two
    # sections, use DeepSpeed's ZeRO 1.
    for_zero = _keys_for_zero(config, given, path, precision, zero, notes)
    overlaps = config.parallel.overlap_grad_reduce and not REDUCES & given.keys()
    own = overlaps and zero == 1 and precision in ("fp32", "bf16") and not for_zero
    plain = overlaps and zero == 0 and precision in ("fp32", "fp64")
    refuse(needs_own_reduction(config, zero, own, plain))
    return Resolved(
        deepspeed=_for_deepspeed(config, given, sizes, precision, zero, clip),
        precision=precision,
        zero_stage=zero,
        clip_grad=clip,
        log_interval=log_interval,
        wall_clock_breakdown=bool(given.get("wall_clock_breakdown", False)),
        overlap_grad_reduce=overlaps and zero == 0 and config.parallel.pipe_parallel_size == 0,
        distributed_optimizer=own,
        notes=tuple(notes),
        param_rules=_param_rules(config.optim.param_groups),
    )


def _keys_for_zero(
    config: Config, given: dict[str, Any], path: str, precision: str, zero: int, notes: list[str]
) -> set[str]:
    """Return the keys of the file that need DeepSpeed's ZeRO 1, and add notes on keys without effect to `notes`."""
    if not given:
        return set()
    from .ds_notes import keys_for_zero, notes_on_keys

    notes += notes_on_keys(config, path, given, precision, zero)
    return keys_for_zero(given, precision, zero)


def _param_rules(path: str | None) -> "tuple[ParamRule, ...]":
    if path is None:
        return ()
    from .param_groups import read_param_rules

    return read_param_rules(path)


def _for_deepspeed(
    config: Config, given: Mapping[str, Any], sizes: Mapping[str, int], precision: str, zero: int, clip: float
) -> dict[str, Any]:
    """Return the configuration for `tds.initialize`. given: content of the file. sizes: batch sizes."""
    p = config.parallel
    ds = {key: given[key] for key in PASSED_ON if key in given}
    ds |= sizes
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


def _batch_sizes(config: Config, given: dict[str, Any], path: str, world_size: int) -> tuple[dict[str, int], list[str]]:
    """Return the batch sizes that the flags set, and notes on batch sizes in the file that differ from the flags.

    CPM-Pretrain reads the file's batch sizes only if a pipeline is used. Therefore, a different size raises
    ConfigError if there are two or more pipeline stages, and gives a note otherwise.
    """
    t = config.train
    p = config.parallel
    total = config.train_batch_size(world_size)
    ours = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": t.batch_size,
        "gradient_accumulation_steps": t.gas,
    }
    notes = []
    for key, value in ours.items():
        in_file = given.get(key, value)
        if in_file == value:
            continue
        if p.stages == 1:
            notes.append(
                f"{path} sets {key} = {in_file}, which has no effect without a pipeline; {key} is {value}, as the "
                f"flags set it"
            )
            continue
        context = f" / --context-parallel-size {p.context_parallel_size}" if p.context_parallel_size > 1 else ""
        raise ConfigError(
            f"{path} sets {key} = {in_file}, but the flags set {value}: train_batch_size {total} = "
            f"--batch-size {t.batch_size} x --gas {t.gas} x ({world_size} ranks / --pipe-parallel-size {p.stages} "
            f'/ --model-parallel-size {p.model_parallel_size}{context}); change one of them or write "auto"'
        )
    return ours, notes


def _log_interval(config: Config, given: dict[str, Any], path: str, notes: list[str]) -> int:
    """Return the number of iterations between log lines; add a note to `notes` if the flag overrides the file."""
    in_file = given.get("steps_per_print")
    flag = config.log.log_interval
    if flag is None:
        return 10 if in_file is None else int(in_file)
    if in_file not in (None, flag):
        notes.append(f"{path} sets steps_per_print = {in_file}, but --log-interval {flag} overrides it")
    return flag


def _precision(config: Config, given: dict[str, Any], path: str, fast_bf16: bool) -> str:
    """Return the number format of the run. Raises ConfigError if file and flag contradict each other."""
    enabled = [name for name in ("fp16", "bf16") if given.get(name, {}).get("enabled") is True]
    if len(enabled) == 2:
        raise ConfigError(f"{path} enables both fp16 and bf16; keep one")
    wanted = config.train.dtype
    if wanted == "auto":
        usual = "bf16" if fast_bf16 else "fp32"
        return enabled[0] if enabled else usual
    if enabled and enabled[0] != wanted:
        raise ConfigError(
            f"{path} enables {enabled[0]}, but --precision is {config.train.precision}; change one of them"
        )
    return wanted


def _zero_stage(config: Config, given: dict[str, Any], path: str, precision: str) -> int:
    """Return the stage of ZeRO. Raises ConfigError for a contradiction and for an impossible combination."""
    in_file = given.get("zero_optimization", {}).get("stage")
    flag = config.parallel.zero_stage
    if in_file == "auto":
        in_file = None
    if in_file is not None and flag is not None and in_file != flag:
        raise ConfigError(f"{path} sets ZeRO stage {in_file}, but --zero-stage is {flag}; change one of them")
    is_mixed = precision in ("fp16", "bf16")
    stage = int(_first(flag, in_file, 1 if is_mixed else 0))
    if config.parallel.pipe_parallel_size > 0 and stage > 1:
        raise ConfigError(
            f"ZeRO stage {stage} cannot be used with a pipeline, as each micro-batch would reduce-scatter the "
            f"gradients again; use --zero-stage 1 or --pipe-parallel-size 0"
        )
    if is_mixed and stage == 0:
        raise ConfigError(
            f"{precision} needs fp32 master weights and gradients; use --zero-stage 1 or higher, which keeps them"
        )
    if precision == "fp64" and stage > 0:
        raise ConfigError(f"--precision fp64, a mode for numerical checks, needs --zero-stage 0, not {stage}")
    return stage


def _agree(key: str, given: dict[str, Any], flag: str, flag_value: Any, default: Any, path: str) -> Any:
    """Return the value of a setting that a flag or a key of the file gives. Raises ConfigError if both differ."""
    in_file = given.get(key)
    if in_file is not None and flag_value is not None and in_file != flag_value:
        raise ConfigError(f"{path} sets {key} = {in_file}, but {flag} is {flag_value}; change one of them")
    return _first(flag_value, in_file, default)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)

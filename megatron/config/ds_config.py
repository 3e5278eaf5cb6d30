"""Reconciliation of DeepSpeed's JSON file with the flags. A contradiction between the two is an error.

If a key is absent or "auto", the flag decides. A key that would have no effect is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import tds

from ..json_text import brief, shown
from ..storage import PlaceError, local
from .conflicts import conflicts_with_compile
from .ds_notes import keys_for_zero, notes_on_keys
from .fields import ConfigError, refuse
from .names import nearest
from .param_groups import ParamRule, read_param_rules
from .sections import Config
from .settings_files import read_json

# Keys that configure gradient reduction in DeepSpeed. If one is given, DeepSpeed must do the reduction.
REDUCES = {"prescale_gradients", "gradient_predivide_factor", "communication_data_type"}
# Keys that are passed on to DeepSpeed. RESOLVED: keys that are first reconciled with the command-line flags.
PASSED_ON = REDUCES | {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state", "flops_profiler",
    "comms_logger", "tensorboard", "wandb", "csv_monitor", "memory_breakdown",
}  # fmt: skip
RESOLVED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16", "bf16", "steps_per_print", "wall_clock_breakdown",
}  # fmt: skip
SECTIONS = {
    "zero_optimization", "fp16", "bf16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor",
}  # fmt: skip
LATE_GATHER = (
    "--overlap-param-gather needs --zero-stage 1 in fp32 or bf16, --overlap-grad-reduce, and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
PARTIAL_REPLICAS = (
    "--expert-parallel-size reduces experts over some replicas only, which DeepSpeed's optimizers cannot: use "
    "--zero-stage 0 in fp32, or --zero-stage 1 in fp32 or bf16, with --overlap-grad-reduce and a --deepspeed-config "
    "without other keys in zero_optimization and bf16"
)
WHOLE_MATRICES = (
    "--optimizer muon steps whole matrices, which DeepSpeed's ZeRO shards: use --zero-stage 0 in fp32, or "
    "--zero-stage 1 in fp32 or bf16 with --overlap-grad-reduce and a --deepspeed-config without other keys in "
    "zero_optimization and bf16"
)
ENABLED = '{"enabled": true}'
SECTIONS_LOOK = {"zero_optimization": '{"stage": 1}'}
NUMBERS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print",
}  # fmt: skip
INSTEAD = {
    "optimizer": "--optimizer, --lr, --adam-beta1 and --weight-decay",
    "scheduler": "--lr-decay-style, --warmup and --min-lr",
    "activation_checkpointing": "--checkpoint-activations and --checkpoint-num-layers",
    "sparse_attention": "no flag: it is not supported",
    "amp": "--precision",
}
PIPELINE = "--pipeline-schedule, --virtual-pipeline-size, --partition-method and --checkpoint-activations"


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
    path = config.train.deepspeed_config
    given = {k: v for k, v in (read_json(path) if path else {}).items() if v not in ("auto", None)}
    path = path or "ds_config"
    _refuse_unknown(given, path)
    _check_pipeline(config, given.pop("pipeline", {}), path)
    _check_sections(given, path)
    _require_overflow_checks(given, path)
    batch, notes = _batch_sizes(config, given, path, world_size)
    precision = _precision(config, given, path, fast_bf16)
    zero = _zero_stage(config, given, path, precision)
    if config.train.compile:
        refuse(conflicts_with_compile(config, zero))
    clip = _agree("gradient_clipping", given, "--clip-grad", config.optim.clip_grad, 1.0, path)
    log_interval, note = _log_interval(config, given, path)
    notes += [*note, *notes_on_keys(config, path, given, precision, zero)]

    ds = {key: given[key] for key in PASSED_ON if key in given}
    ds |= batch
    ds["zero_optimization"] = {**given.get("zero_optimization", {}), "stage": zero}
    p = config.parallel
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
    # Without ZeRO and pipeline, training/engine.py clips gradients, as DeepSpeed would not report the gradient norm.
    plain = zero == 0 and p.pipe_parallel_size == 0
    ds["gradient_clipping"] = 0.0 if plain else clip
    if precision in ("fp16", "bf16"):
        ds[precision] = {**given.get(precision, {}), "enabled": True}
    if precision == "bf16":
        ds["data_types"] = {"grad_accum_dtype": "fp32"}
        # Add each bf16 gradient to its fp32 sum at once and free it. DeepSpeed's default keeps it until the pass ends.
        ds["bf16"].setdefault("immediate_grad_update", True)
        if zero <= 1:  # without this key, DeepSpeed would reduce these fp32 sums between replicas in bf16
            ds.setdefault("communication_data_type", "fp32")
    overlap = p.overlap_grad_reduce and not REDUCES & given.keys()
    # tds' ZeRO 1 reads only the keys zero_optimization.stage and bf16.enabled. If the file sets other keys of these two
    # sections, use DeepSpeed's ZeRO 1.
    asks = keys_for_zero(given, precision, zero)
    own = overlap and zero == 1 and precision in ("fp32", "bf16") and not asks
    refuse(_needs_own_reduction(config, zero, own, overlap and zero == 0 and precision in ("fp32", "fp64")))
    overlap &= zero == 0 and p.pipe_parallel_size == 0
    breakdown = bool(given.get("wall_clock_breakdown", False))
    rules = read_param_rules(config.optim.param_groups) if config.optim.param_groups else ()
    return Resolved(ds, precision, zero, float(clip), log_interval, breakdown, overlap, own, tuple(notes), rules)


def _needs_own_reduction(config: Config, zero: int, own: bool, plain: bool) -> Iterator[str]:
    """Yield an error text for each flag that needs this project's reduction of gradients instead of DeepSpeed's.

    own: whether the run uses this project's ZeRO 1. plain: whether it reduces all gradients itself, without ZeRO.
    """
    if config.parallel.overlap_param_gather and not own:
        yield LATE_GATHER
    if config.optim.optimizer == "muon" and zero and not own:
        yield WHOLE_MATRICES
    if config.parallel.expert_parallel_size > 1 and not (own or plain):
        yield PARTIAL_REPLICAS


def _refuse_unknown(given: dict[str, Any], path: str) -> None:
    for key in given:
        if key in INSTEAD:
            raise ConfigError(f"{path}: {key!r} has no effect in this project; remove it and use {INSTEAD[key]}")
        if key not in PASSED_ON | RESOLVED | {"pipeline"}:
            raise ConfigError(f"{path}: unknown key {brief(repr(key))}{nearest(key, PASSED_ON | RESOLVED)}")


def _check_pipeline(config: Config, section: Any, path: str) -> None:
    """Raise ConfigError unless the flags have the values of `section`, the section "pipeline" of the file."""
    p = config.parallel
    flags = {
        "schedule": ("--pipeline-schedule", p.pipeline_schedule),
        "extra_warmup": ("--pipeline-extra-warmup", p.pipeline_extra_warmup),
        "timeout": ("--pipeline-timeout", p.pipeline_timeout),
    }
    if not isinstance(section, dict):
        raise ConfigError(f'{path}: \'pipeline\' must be an object, such as {{"schedule": "1f1b"}}')
    for key, value in section.items():
        if key not in flags:
            raise ConfigError(f"{path}: {brief(repr(key))} in 'pipeline' has no effect in this project; use {PIPELINE}")
        flag, wanted = flags[key]
        if value not in ("auto", None, wanted):
            raise ConfigError(
                f"{path} sets pipeline.{key} = {brief(value)}, but {flag} is {wanted}; change one of them"
            )


def _refuse_urls(given: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a URL as the value of a path, such as nvme_path, which would name a local folder."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            _refuse_urls(value, path)
        elif isinstance(value, str) and key.endswith(("path", "file", "dir")):
            try:
                local(value)
            except PlaceError as error:
                raise ConfigError(f"{path}: {key!r}: {error}") from None


def _check_sections(given: dict[str, Any], path: str) -> None:
    """Normalise `given` in place: replace a section `true` or `false` by an object; remove null and "auto" values.

    Raises ConfigError for invalid sections and values.
    """
    _refuse_urls(given, path)
    for key in SECTIONS & given.keys():
        if isinstance(given[key], bool):
            given[key] = {"stage": int(given[key])} if key == "zero_optimization" else {"enabled": given[key]}
        if not isinstance(given[key], dict):
            raise ConfigError(
                f"{path}: {key!r} must be an object, such as {SECTIONS_LOOK.get(key, ENABLED)}, not {shown(given[key])}"
            )
        given[key] = {name: value for name, value in given[key].items() if value is not None}
        if given[key].get("enabled") == "auto":
            del given[key]["enabled"]
        if not isinstance(given[key].get("enabled", False), bool):
            raise ConfigError(f"{path}: in {key!r}, 'enabled' must be true or false")
        problem = tds.complaint(key, given[key])
        if problem:
            raise ConfigError(f"{path}: in {key!r}, {brief(problem, 300)}")
    for key in NUMBERS & given.keys():
        if isinstance(given[key], bool) or not isinstance(given[key], (int, float)) or not isfinite(given[key]):
            raise ConfigError(f"{path}: {key!r} must be a number, not {shown(given[key])}")


def _require_overflow_checks(given: dict[str, Any], path: str) -> None:
    """Raise ConfigError for settings that would make DeepSpeed apply non-finite gradients."""
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if given.get(section, {}).get(key) is False:
            raise ConfigError(f"{path} sets {section}.{key} = false, which would apply NaN or Inf gradients; remove it")


def _batch_sizes(config: Config, given: dict[str, Any], path: str, world_size: int) -> tuple[dict[str, int], list[str]]:
    """Return the batch sizes that the flags set, and notes on batch sizes in the file that differ from the flags.

    CPM-Pretrain reads the file's batch sizes only if a pipeline is used. Therefore, a different size raises
    ConfigError if there are two or more pipeline stages, and gives a note otherwise.
    """
    t = config.train
    p = config.parallel
    total = config.train_batch_size(world_size)
    context = f" / --context-parallel-size {p.context_parallel_size}" if p.context_parallel_size > 1 else ""
    ours = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": t.batch_size,
        "gradient_accumulation_steps": t.gas,
    }
    notes = []
    for key, value in ours.items():
        if key not in given or given[key] == value:
            continue
        if p.stages == 1:
            notes.append(
                f"{path} sets {key} = {given[key]}, which has no effect without a pipeline; {key} is {value}, "
                f"as the flags set it"
            )
            continue
        raise ConfigError(
            f"{path} sets {key} = {given[key]}, but the flags set {value}: train_batch_size {total} = "
            f"--batch-size {t.batch_size} x --gas {t.gas} x ({world_size} ranks / --pipe-parallel-size {p.stages} "
            f'/ --model-parallel-size {p.model_parallel_size}{context}); change one of them or write "auto"'
        )
    return ours, notes


def _log_interval(config: Config, given: dict[str, Any], path: str) -> tuple[int, list[str]]:
    """Return the number of iterations between log lines, and a note if the flag overrides the file."""
    in_file = given.get("steps_per_print")
    flag = config.log.log_interval
    if flag is None:
        return int(in_file if in_file is not None else 10), []
    if in_file in (None, flag):
        return flag, []
    return flag, [f"{path} sets steps_per_print = {in_file}, but --log-interval {flag} overrides it"]


def _precision(config: Config, given: dict[str, Any], path: str, fast_bf16: bool) -> str:
    enabled = [name for name in ("fp16", "bf16") if given.get(name, {}).get("enabled") is True]
    if len(enabled) == 2:
        raise ConfigError(f"{path} enables both fp16 and bf16; keep one")
    wanted = config.train.dtype
    named = config.train.precision
    if wanted == "auto":
        return enabled[0] if enabled else "bf16" if fast_bf16 else "fp32"
    if enabled and enabled[0] != wanted:
        raise ConfigError(f"{path} enables {enabled[0]}, but --precision is {named}; change one of them")
    return wanted


def _zero_stage(config: Config, given: dict[str, Any], path: str, precision: str) -> int:
    in_file = given.get("zero_optimization", {}).get("stage")
    flag = config.parallel.zero_stage
    if in_file == "auto":
        in_file = None
    if in_file is not None and flag is not None and in_file != flag:
        raise ConfigError(f"{path} sets ZeRO stage {in_file}, but --zero-stage is {flag}; change one of them")
    mixed = precision in ("fp16", "bf16")
    stage = next((s for s in (flag, in_file) if s is not None), 1 if mixed else 0)
    if config.parallel.pipe_parallel_size > 0 and stage > 1:
        raise ConfigError(
            f"ZeRO stage {stage} cannot be used with a pipeline, as each micro-batch would reduce-scatter the "
            f"gradients again; use --zero-stage 1 or --pipe-parallel-size 0"
        )
    if mixed and stage == 0:
        raise ConfigError(
            f"{precision} needs fp32 master weights and gradients; use --zero-stage 1 or higher, which keeps them"
        )
    if precision == "fp64" and stage > 0:
        raise ConfigError(f"--precision fp64, a mode for numerical checks, needs --zero-stage 0, not {stage}")
    return int(stage)


def _agree(key: str, given: dict[str, Any], flag: str, flag_value: Any, default: Any, path: str) -> Any:
    in_file = given.get(key)
    if in_file is not None and flag_value is not None and in_file != flag_value:
        raise ConfigError(f"{path} sets {key} = {in_file}, but {flag} is {flag_value}; change one of them")
    return next(value for value in (flag_value, in_file, default) if value is not None)

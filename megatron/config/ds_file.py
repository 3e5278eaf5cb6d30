"""DeepSpeed's JSON file: its keys, and refusal of unknown and invalid ones."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NamedTuple

from ..json_text import brief, shown
from ..storage import PlaceError, require_local
from .fields import ConfigError
from .names import nearest
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


def read_file(config: Config, complaint: Callable[[str, dict[str, Any]], str | None]) -> dict[str, Any]:
    """Return the content of --deepspeed-config without the keys that are absent, null or "auto"; {} without the file.

    complaint: function (name, content) that returns what is wrong with a section, else None.
    Raises ConfigError for an unknown key, an invalid value, and a section "pipeline" that contradicts the flags.
    """
    path = config.train.deepspeed_config
    if path is None:
        return {}
    given = {key: value for key, value in read_json(path).items() if value not in ("auto", None)}
    _refuse_unknown(given, path)
    _check_pipeline(config, given.pop("pipeline", {}), path)
    _refuse_urls(given, path)
    for key in SECTIONS & given.keys():
        given[key] = _section(key, given[key], path)
        problem = complaint(key, given[key])
        if problem:
            raise ConfigError(f"{path}: in {key!r}, {brief(problem, 300)}")
    for key in NUMBERS & given.keys():
        if isinstance(given[key], bool) or not isinstance(given[key], (int, float)) or not isfinite(given[key]):
            raise ConfigError(f"{path}: {key!r} must be a number, not {shown(given[key])}")
    _require_overflow_checks(given, path)
    return given


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
                require_local(value)
            except PlaceError as error:
                raise ConfigError(f"{path}: {key!r}: {error}") from None


def _section(key: str, value: Any, path: str) -> dict[str, Any]:
    """Return a section as an object, also if it is `true` or `false`, without null and "auto" values.

    Raises ConfigError for an invalid section.
    """
    if isinstance(value, bool):
        value = {"stage": int(value)} if key == "zero_optimization" else {"enabled": value}
    if not isinstance(value, dict):
        look = SECTIONS_LOOK.get(key, ENABLED)
        raise ConfigError(f"{path}: {key!r} must be an object, such as {look}, not {shown(value)}")
    section = {name: each for name, each in value.items() if each is not None}
    if section.get("enabled") == "auto":
        del section["enabled"]
    if not isinstance(section.get("enabled", False), bool):
        raise ConfigError(f"{path}: in {key!r}, 'enabled' must be true or false")
    return section


def _require_overflow_checks(given: dict[str, Any], path: str) -> None:
    """Raise ConfigError for settings that would make DeepSpeed apply non-finite gradients."""
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if given.get(section, {}).get(key) is False:
            raise ConfigError(f"{path} sets {section}.{key} = false, which would apply NaN or Inf gradients; remove it")


class FileValues(NamedTuple):
    """Values of the file that replace defaults of flags, None for an absent key, and notes on values without effect."""

    precision: str | None
    zero_stage: int | None
    clip_grad: float | None
    log_interval: int | None
    notes: list[str]


def values_of(config: Config, given: dict[str, Any], world_size: int) -> FileValues:
    """Return the values of the file, whose content is `given`. Raises ConfigError if a flag contradicts one."""
    path = path_of(config)
    notes = _other_batch_sizes(config, given, world_size)
    enabled = [name for name in ("fp16", "bf16") if given.get(name, {}).get("enabled") is True]
    if len(enabled) == 2:
        raise ConfigError(f"{path} enables both fp16 and bf16; keep one")
    precision = enabled[0] if enabled else None
    if precision and config.train.dtype not in ("auto", precision):
        raise ConfigError(
            f"{path} enables {precision}, but --precision is {config.train.precision}; change one of them"
        )
    zero = given.get("zero_optimization", {}).get("stage")
    if zero == "auto":
        zero = None
    _refuse_other("ZeRO stage", zero, "--zero-stage", config.parallel.zero_stage, path)
    clip = given.get("gradient_clipping")
    _refuse_other("gradient_clipping =", clip, "--clip-grad", config.optim.clip_grad, path)
    interval = given.get("steps_per_print")
    flag = config.log.log_interval
    if flag is not None and interval not in (None, flag):
        notes.append(f"{path} sets steps_per_print = {interval}, but --log-interval {flag} overrides it")
    return FileValues(precision, zero, clip, interval, notes)


def path_of(config: Config) -> str:
    """Return the path of the file, for messages."""
    return config.train.deepspeed_config or "ds_config"


def _refuse_other(words: str, in_file: Any, flag: str, value: Any, path: str) -> None:
    if None not in (in_file, value) and in_file != value:
        raise ConfigError(f"{path} sets {words} {in_file}, but {flag} is {value}; change one of them")


def batch_sizes(config: Config, world_size: int) -> dict[str, int]:
    """Return the batch sizes that the flags set, by DeepSpeed's keys."""
    return {
        "train_batch_size": config.train_batch_size(world_size),
        "train_micro_batch_size_per_gpu": config.train.batch_size,
        "gradient_accumulation_steps": config.train.gas,
    }


def _other_batch_sizes(config: Config, given: dict[str, Any], world_size: int) -> list[str]:
    """Return notes on batch sizes in the file that differ from the flags.

    CPM-Pretrain reads the file's batch sizes only if a pipeline is used. Therefore, a different size raises
    ConfigError if there are two or more pipeline stages, and gives a note otherwise.
    """
    t = config.train
    p = config.parallel
    path = path_of(config)
    notes = []
    sizes = batch_sizes(config, world_size)
    for key, value in sizes.items():
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
            f"{path} sets {key} = {in_file}, but the flags set {value}: train_batch_size {sizes['train_batch_size']} = "
            f"--batch-size {t.batch_size} x --gas {t.gas} x ({world_size} ranks / --pipe-parallel-size {p.stages} "
            f'/ --model-parallel-size {p.model_parallel_size}{context}); change one of them or write "auto"'
        )
    return notes

"""DeepSpeed's JSON file: its keys, and refusal of unknown and invalid ones."""

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

from ..json_text import brief, format_value
from ..storage import PathError, require_local
from .fields import ConfigError, flag
from .names import nearest
from .sections import Config
from .settings_files import read_json

# Keys that configure gradient reduction in DeepSpeed. If one is given, DeepSpeed must do the reduction.
REDUCTION_KEYS = {"prescale_gradients", "gradient_predivide_factor", "communication_data_type"}
# Keys that are passed on to DeepSpeed. RECONCILED_KEYS: keys that are first reconciled with the command-line flags.
PASSED_KEYS = REDUCTION_KEYS | {
    "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state", "flops_profiler",
    "comms_logger", "tensorboard", "wandb", "csv_monitor", "memory_breakdown",
}  # fmt: skip
SECTION_KEYS = {
    "zero_optimization", "fp16", "bf16", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor",
}  # fmt: skip
NUMBER_KEYS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print",
}  # fmt: skip
RECONCILED_KEYS = NUMBER_KEYS | {"fp16", "bf16", "wall_clock_breakdown"}
REPLACEMENT_FLAGS = {
    "optimizer": "--optimizer, --lr, --adam-beta1 and --weight-decay",
    "scheduler": "--lr-decay-style, --warmup and --min-lr",
    "activation_checkpointing": "--checkpoint-activations and --checkpoint-num-layers",
    "sparse_attention": "no flag: it is not supported",
    "amp": "--precision",
}
PIPELINE_FLAGS = "--pipeline-schedule, --virtual-pipeline-size, --partition-method and --checkpoint-activations"
Content = dict[str, Any]  # of the file or a section


def read_file(config: Config, find_problem: Callable[[str, Content], str | None]) -> Content:
    """Return the content of --deepspeed-config without the keys that are absent, null or "auto"; {} without the file.

    find_problem: function (name, content) that returns what is wrong with a section, else None.
    Raises ConfigError for an unknown key, an invalid value, and a section "pipeline" that contradicts the flags.
    """
    path = config.train.deepspeed_config
    if path is None:
        return {}
    content = {key: value for key, value in read_json(path).items() if value not in ("auto", None)}
    _refuse_unknown(content, path)
    _check_pipeline(config, content.pop("pipeline", {}), path)
    _refuse_urls(content, path)
    for key in SECTION_KEYS & content.keys():
        section = _normalize_section(key, content[key], path)
        content[key] = section
        problem = find_problem(key, section)
        if problem:
            raise ConfigError(f"{path}: in {key!r}, {brief(problem, 300)}")
    for key in NUMBER_KEYS & content.keys():
        value = content[key]
        is_number = type(value) in (int, float)  # True, an int in Python, is no number here
        if not is_number or not 0 <= value < inf:
            raise ConfigError(f"{path}: {key!r} must be a number of at least 0, not {format_value(value)}")
    fp16 = content.get("fp16", {})
    if _fp16_number(fp16, "hysteresis", 1, path) < 1:  # DeepSpeed would never lower the scale, and skip each step
        raise ConfigError(f"{path}: fp16.hysteresis must be at least 1, which lowers the scale at each overflow")
    power = _fp16_number(fp16, "initial_scale_power", 0, path)
    if power > 62:  # torch multiplies by 64-bit integers
        raise ConfigError(
            f"{path}: fp16.initial_scale_power {power:g} must be at most 62: the loss scale is 2 to this power"
        )
    _require_overflow_checks(content, path)
    return content


def _fp16_number(fp16: Content, key: str, default: int, path: str) -> float:
    """Return a value of the section fp16, which may be a text such as "16". Raises ConfigError if it is no number."""
    value = fp16.get(key, default)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{path}: fp16.{key} must be a number, not {format_value(value)}") from None


def offloaded_part(zero_section: Content) -> str | None:
    """Return the first key of zero_optimization that moves tensors to the host or to disks; None if none does."""
    for name in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"):
        value = zero_section.get(name)
        is_off = value.get("device", "none") == "none" if isinstance(value, dict) else not value
        if not is_off:
            return name
    return None


def _refuse_unknown(content: Content, path: str) -> None:
    for key in content:
        if key in REPLACEMENT_FLAGS:
            instead = REPLACEMENT_FLAGS[key]
            raise ConfigError(f"{path}: {key!r} has no effect in this project; remove it and use {instead}")
        if key not in PASSED_KEYS | RECONCILED_KEYS | {"pipeline"}:
            raise ConfigError(f"{path}: unknown key {brief(repr(key))}{nearest(key, PASSED_KEYS | RECONCILED_KEYS)}")


def _check_pipeline(config: Config, section: Any, path: str) -> None:
    """Raise ConfigError unless the flags have the values of `section`, the section "pipeline" of the file."""
    if not isinstance(section, dict):
        raise ConfigError(f'{path}: \'pipeline\' must be an object, such as {{"schedule": "1f1b"}}')
    for key, value in section.items():
        if key not in ("schedule", "extra_warmup", "timeout"):
            raise ConfigError(
                f"{path}: {brief(repr(key))} in 'pipeline' has no effect in this project; use {PIPELINE_FLAGS}"
            )
        name = f"pipeline_{key}"
        wanted = getattr(config.parallel, name)
        if value not in ("auto", None, wanted):
            raise ConfigError(
                f"{path} sets pipeline.{key} = {brief(value)}, but {flag(name)} is {wanted}; change one of them"
            )


def _refuse_urls(content: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a URL as the value of a path, such as nvme_path, which would name a local folder."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            _refuse_urls(value, path)
        elif isinstance(value, str) and key.endswith(("path", "file", "dir")):
            try:
                require_local(value)
            except PathError as error:
                raise ConfigError(f"{path}: {key!r}: {error}") from None


def _normalize_section(key: str, value: Any, path: str) -> Content:
    """Return a section as an object, also if it is `true` or `false`, without null and "auto" values.

    Raises ConfigError for an invalid section.
    """
    if isinstance(value, bool):  # `"zero_optimization": true` is ZeRO 1, `"bf16": true` enables bf16
        value = {"stage": int(value)} if key == "zero_optimization" else {"enabled": value}
    if not isinstance(value, dict):
        example = '{"stage": 1}' if key == "zero_optimization" else '{"enabled": true}'
        raise ConfigError(f"{path}: {key!r} must be an object, such as {example}, not {format_value(value)}")
    section = {name: setting for name, setting in value.items() if setting not in ("auto", None)}
    if not isinstance(section.get("enabled", False), bool):
        raise ConfigError(f"{path}: in {key!r}, 'enabled' must be true or false")
    return section


def _require_overflow_checks(content: Content, path: str) -> None:
    """Raise ConfigError for settings that would make DeepSpeed apply non-finite gradients."""
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if content.get(section, {}).get(key) is False:
            raise ConfigError(f"{path} sets {section}.{key} = false, which would apply NaN or Inf gradients; remove it")


class FileValues(NamedTuple):
    """Values of the file that replace defaults of flags, None for an absent key, and notes on values without effect."""

    precision: str | None
    zero_stage: int | None
    clip_grad: float | None
    log_interval: int | None
    notes: list[str]


def reconcile_values(config: Config, content: Content, world_size: int) -> FileValues:
    """Return the values of the file with the content `content`. Raises ConfigError if a flag contradicts one."""
    path = config.train.deepspeed_config or "ds_config"  # for messages
    notes = list(_note_batch_sizes(config, content, world_size, path))
    enabled = enabled_formats(content)
    if len(enabled) == 2:
        raise ConfigError(f"{path} enables both fp16 and bf16; keep one")
    precision = enabled[0] if enabled else None
    if precision and config.train.dtype not in ("auto", precision):
        raise ConfigError(
            f"{path} enables {precision}, but --precision is {config.train.precision}; change one of them"
        )
    zero_stage = content.get("zero_optimization", {}).get("stage")
    _require_equal("ZeRO stage", zero_stage, "--zero-stage", config.parallel.zero_stage, path)
    clip_grad = content.get("gradient_clipping")
    # The first argument begins the message "FILE sets gradient_clipping = 1.0, but --clip-grad is 0.5".
    _require_equal("gradient_clipping =", clip_grad, "--clip-grad", config.optim.clip_grad, path)
    interval = content.get("steps_per_print")
    log_interval = config.log.log_interval
    if log_interval is not None and interval not in (None, log_interval):
        notes.append(f"{path} sets steps_per_print = {interval}, but --log-interval {log_interval} overrides it")
    return FileValues(precision, zero_stage, clip_grad, interval, notes)


def enabled_formats(content: Mapping[str, Any]) -> list[str]:
    """Return the 16-bit number formats that a file with the content `content` enables."""
    enabled = []
    for name in ("fp16", "bf16"):
        section = content.get(name)
        if section is True or (isinstance(section, dict) and section.get("enabled") is True):
            enabled.append(name)
    return enabled


def _require_equal(key: str, in_file: Any, flag: str, value: Any, path: str) -> None:
    """Raise ConfigError if both the file and a flag are given, with different values."""
    if None not in (in_file, value) and in_file != value:
        raise ConfigError(f"{path} sets {key} {in_file}, but {flag} is {value}; change one of them")


def batch_sizes(config: Config, world_size: int) -> dict[str, int]:
    """Return the batch sizes that the flags set, by DeepSpeed's keys."""
    return {
        "train_batch_size": config.train_batch_size(world_size),
        "train_micro_batch_size_per_gpu": config.train.batch_size,
        "gradient_accumulation_steps": config.train.gas,
    }


def _note_batch_sizes(config: Config, content: Content, world_size: int, path: str) -> Iterator[str]:
    """Yield notes on batch sizes in the file that differ from the flags.

    CPM-Pretrain reads the file's batch sizes only if a pipeline is used. Therefore, a different size raises
    ConfigError if there are two or more pipeline stages, and gives a note otherwise.
    """
    t = config.train
    p = config.parallel
    sizes = batch_sizes(config, world_size)
    for key, value in sizes.items():
        in_file = content.get(key, value)
        if in_file == value:  # or the file does not have the key
            continue
        if p.stages == 1:
            yield (
                f"{path} sets {key} = {in_file}, which has no effect without a pipeline; {key} is {value}, as the "
                f"flags set it"
            )
            continue
        # The message shows the factors of train_batch_size, this one only if it is used.
        context = f" / --context-parallel-size {p.context_parallel_size}" if p.context_parallel_size > 1 else ""
        raise ConfigError(
            f"{path} sets {key} = {in_file}, but the flags set {value}: train_batch_size {sizes['train_batch_size']} = "
            f"--batch-size {t.batch_size} x --gas {t.gas} x ({world_size} ranks / --pipe-parallel-size {p.stages} "
            f'/ --model-parallel-size {p.model_parallel_size}{context}); change one of them or write "auto"'
        )

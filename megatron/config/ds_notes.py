"""Keys of DeepSpeed's JSON file that have no effect in a run, by stage of ZeRO and number format."""

import os
from collections.abc import Iterator
from typing import Any

from .sections import Config

_SHARED_KEYS = {
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm", "offload_optimizer",
    "zenflow", "cpu_offload", "cpu_offload_use_pin_memory", "legacy_stage1",
}  # fmt: skip
# Stage of ZeRO -> the keys of zero_optimization that DeepSpeed 0.19 reads, apart from those of its checkpoints.
_KEYS_BY_STAGE = {
    0: {"stage", "legacy_stage1"},
    1: _SHARED_KEYS | {
        "use_multi_rank_bucket_allreduce", "allgather_bucket_size", "compute_grad_norm", "round_robin_gradients",
        "parameter_alignment", "ignore_unused_parameters",
    },
    3: _SHARED_KEYS | {
        "offload_param", "cpu_offload_param", "sub_group_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
        "zero_quantized_nontrainable_weights", "memory_efficient_linear", "override_module_apply",
        "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
    },
}  # fmt: skip
_KEYS_BY_STAGE[2] = _KEYS_BY_STAGE[1]
# Keys that DeepSpeed's optimizer for bf16 with ZeRO 1 reads. With offload_optimizer, it uses another optimizer.
_KEYS_IN_BF16 = {"stage", "legacy_stage1", "allgather_bucket_size", "compute_grad_norm", "zenflow"}
# Keys that only DeepSpeed's own checkpoints read.
_CHECKPOINT_KEYS = {
    "load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
}  # fmt: skip
_UNREAD_KEYS = {"allgather_partitions", "save_muon_momentum_buffer_in_memory"}  # no code of DeepSpeed that a run calls
_DYNAMIC_SCALE_DEFAULTS = {
    "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}  # fmt: skip
# Key of fp16 -> the value that needs no note, as it is DeepSpeed's default.
_FP16_DEFAULTS = {
    **_DYNAMIC_SCALE_DEFAULTS, "loss_scale": 0, "auto_cast": False, "fp16_master_weights_and_grads": False,
}  # fmt: skip
Keys = dict[str, Any]  # of the file or a section, with their values
Notes = Iterator[tuple[str, str]]  # pairs of key and reason


def ineffective_keys(given: Keys, precision: str, zero: int) -> dict[str, list[tuple[str, str]]]:
    """Return, by section of the file, the keys without effect as pairs of key and reason.

    given: content of the file with normalised sections. precision, zero: number format and stage of ZeRO of the run.
    """
    zero_keys = given.get("zero_optimization", {})
    offloads = _offloads_optimizer(zero_keys)
    by_section = {
        "zero_optimization": list(_ineffective_in_zero(zero_keys, precision, zero)),
        "fp16": list(_ineffective_in_fp16(given.get("fp16", {}), precision)),
        "bf16": list(_ineffective_in_bf16(given.get("bf16", {}), precision, zero, offloads)),
    }
    for section in ("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor"):
        keys = given.get(section, {})
        if keys.get("enabled") is not True:
            by_section[section] = [(key, "enabled is not true") for key in keys if key != "enabled"]
    return {section: keys for section, keys in by_section.items() if keys}


def _offloads_optimizer(keys: Keys) -> bool:
    return "offload_optimizer" in keys or "cpu_offload" in keys


def _ineffective_in_zero(keys: Keys, precision: str, zero: int) -> Notes:
    """Yield each key of zero_optimization that has no effect, with the reason."""
    read_keys = _KEYS_BY_STAGE[zero]
    reason = f"the stage of ZeRO is {zero}"
    if precision == "bf16" and zero == 1 and not _offloads_optimizer(keys):
        read_keys = _KEYS_IN_BF16
        reason += " in bf16"
    for key in keys:
        if key in _CHECKPOINT_KEYS:
            yield key, "checkpoints are not those of DeepSpeed"
        elif key in _UNREAD_KEYS:
            yield key, "DeepSpeed does not read it"
        elif key not in read_keys:
            yield key, reason


def _ineffective_in_fp16(keys: Keys, precision: str) -> Notes:
    """Yield keys of the loss scale that have other values than DeepSpeed's defaults and no effect."""
    changed = [key for key, default in _FP16_DEFAULTS.items() if keys.get(key, default) != default]
    for key in changed:
        if precision != "fp16":
            yield key, f"the run is in {precision}"
        # A loss_scale of 0, the default, stands for a dynamic loss scale.
        elif keys.get("loss_scale") and key in _DYNAMIC_SCALE_DEFAULTS:
            yield key, "loss_scale sets a constant loss scale"


def _ineffective_in_bf16(keys: Keys, precision: str, zero: int, offloads: bool) -> Notes:
    """Yield each key of bf16 that has no effect, with the reason."""
    given = keys.keys() - {"enabled"}
    if precision != "bf16":
        for key in given:
            yield key, f"the run is in {precision}"
        return
    # Only ZeRO 1 uses DeepSpeed's optimizer for bf16; with offloading, it uses the optimizer of the other stages.
    if "immediate_grad_update" in given and zero != 1:
        yield "immediate_grad_update", f"the stage of ZeRO is {zero}"
    if "bf16_master_weights_and_grads" in given and zero == 1 and not offloads:
        yield "bf16_master_weights_and_grads", "the stage of ZeRO is 1"


def keys_read_by_zero1(given: Keys, precision: str, zero: int) -> set[str]:
    """Return the keys of the file, besides the stage and the number format, that DeepSpeed's ZeRO 1 would read."""
    ineffective = ineffective_keys(given, precision, zero)
    effective = set()
    for section, resolved_key in (("zero_optimization", "stage"), ("bf16", "enabled")):
        effective.update(given.get(section, {}))  # adds the keys of the section
        effective.discard(resolved_key)
        effective.difference_update(key for key, _ in ineffective.get(section, ()))
    return effective


def notes_on_keys(config: Config, given: Keys, precision: str, zero: int) -> Iterator[str]:
    """Yield a note for each section of the file and each reason why keys of it have no effect."""
    path = config.train.deepspeed_config
    for section, keys in ineffective_keys(given, precision, zero).items():
        by_reason: dict[str, list[str]] = {}  # reason -> keys, so that one note names all of them
        for key, reason in keys:
            by_reason.setdefault(reason, []).append(key)
        for reason, names in by_reason.items():
            yield f"{path}: {', '.join(names)} in {section!r} has no effect: {reason}"
    casts_inputs = precision == "fp16" and given.get("fp16", {}).get("auto_cast")
    if casts_inputs and config.model.family is not None:  # a custom model, without a family, may have other inputs
        yield f"{path}: auto_cast in 'fp16' has no effect: the inputs of the model are token ids"
    offloads = given.get("zero_optimization", {}).get("offload_optimizer")
    if given.get("zero_force_ds_cpu_optimizer") and not offloads:
        yield f"{path}: zero_force_ds_cpu_optimizer has no effect: offload_optimizer is not given"
    if os.environ.get("TDS_LOG_LEVEL", "error").lower() in ("info", "debug"):
        return  # DeepSpeed's log is printed, so the keys below have an effect
    for key in ("dump_state", "comms_logger"):
        # dump_state is true or false. comms_logger is a section; `false` became {"enabled": False}.
        if given.get(key) not in (None, False, {"enabled": False}):
            yield f"{path}: {key} writes to DeepSpeed's log, which TDS_LOG_LEVEL=info shows"

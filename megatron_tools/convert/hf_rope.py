"""Rotary position settings in config.json.

The keys are `rope_theta` and `rope_scaling`. Since transformers 5, the key `rope_parameters` can hold both settings.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig

Settings = dict[str, Any]  # our settings by name, or keys of a config.json
Values = Mapping[str, Any]  # the content of a config.json
# Type of rotary scaling -> keys that only some types use. All types accept further keys, such as rope_theta.
TYPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
SCALING_KEYS = {
    *(key for keys in TYPE_KEYS.values() for key in keys),
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "alpha",
}


def rope_settings(values: Values, where: Path) -> Settings:
    """Convert the values from `read_config` to our rotary settings by name. Raises ValueError for unsupported ones."""
    rope, source_key = _rope_and_key(values, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in TYPE_KEYS:
        raise ValueError(
            f"{where}: {source_key} has the scaling type {kind!r}; only {', '.join(TYPE_KEYS)} can be converted"
        )
    if rope.get("type", kind) != kind:
        raise ValueError(f"{where}: {source_key} has type {rope['type']!r} but rope_type {kind!r}; they must be equal")
    # transformers would silently ignore a key that belongs to another scaling type.
    keys_of_others = SCALING_KEYS.difference(TYPE_KEYS[kind])
    for key in rope:
        if key in keys_of_others and rope[key] is not None:
            raise ValueError(
                f"{where}: the key {key} of {source_key} has no effect with type {kind}; remove it from the file"
            )

    def read_number(key: str, default: float | None = None) -> float:
        value: Any = default if rope.get(key) is None else rope[key]
        if type(value) not in (int, float):
            raise ValueError(f"{where}: {key} of {source_key} is {value!r}, not a number")
        return float(value)

    # A missing key means the supported value.
    for key, supported in (("partial_rotary_factor", 1), ("truncate", True)):
        if rope.get(key, supported) != supported:
            raise ValueError(f"{where}: {key} of {source_key} is {rope[key]}; this project supports only {supported}")
    # rope_theta may stand inside or outside the rotary settings.
    inside = rope.get("rope_theta")
    outside = values["rope_theta"]
    if None not in (inside, outside) and inside != outside:
        raise ValueError(f"{where}: rope_theta is {outside}, but in {source_key} it is {inside}")
    settings: Settings = {"rope_theta": read_number("rope_theta", _outer_theta(values))}
    if kind == "default":
        return settings
    original_length = read_number("original_max_position_embeddings", values["max_position_embeddings"])
    # For yarn, a factor of null means the quotient of the lengths. The 0 tells a missing factor, which is refused, from
    # a null.
    if kind == "yarn" and rope.get("factor", 0) is None:
        factor = float(values["max_position_embeddings"] / original_length)
    else:
        factor = read_number("factor")
    settings |= {"rope_scaling": kind, "rope_scaling_factor": factor}
    if kind != "linear":
        settings["rope_original_length"] = int(original_length)
    if kind == "llama3":
        settings["rope_low_freq_factor"] = read_number("low_freq_factor")
        settings["rope_high_freq_factor"] = read_number("high_freq_factor")
    if kind == "yarn":
        # transformers replaces a 0 by the default, too, so `or` repeats each default.
        settings |= {
            "rope_beta_fast": read_number("beta_fast", 32.0) or 32.0,
            "rope_beta_slow": read_number("beta_slow", 1.0) or 1.0,
        }
        settings["rope_attention_factor"] = _attention_factor(factor, rope, read_number)
    return settings


def _rope_and_key(values: Values, where: Path) -> tuple[Settings, str]:
    """Return (rotary settings, name of the key that holds them: rope_scaling or rope_parameters).

    Raises ValueError if both keys are set but differ, or if rope_parameters gives layers different settings.
    """
    scaling = values["rope_scaling"] or {}
    parameters = values["rope_parameters"] or {}
    # Some models have one dict of settings for each type of layer.
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"{where}: rope_parameters differ between layers; such models cannot be converted")
    # With both keys, transformers 5 ignores rope_parameters and other programs ignore rope_scaling, so both must agree.
    if scaling and parameters:
        old = _normalized(scaling, values)
        new = _normalized(parameters, values)
        # A key that only one of the two has counts as a difference.
        for key in (*old, *new):
            if old.get(key) != new.get(key):
                raise ValueError(
                    f"{where}: rope_scaling and rope_parameters must be equal, but {key} is {old.get(key)!r} in the "
                    f"former and {new.get(key)!r} in the latter; remove one of them from the file"
                )
    return (scaling, "rope_scaling") if scaling else (parameters, "rope_parameters")


def _normalized(rope: Values, values: Values) -> Settings:
    """Return `rope` in one form for comparison: with the scaling type as rope_type, and always with rope_theta."""
    # A rope_theta in `rope` replaces the one from outside. A rope_type in it equals the one above.
    normalized = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "rope_theta": _outer_theta(values),
        **rope,
    }
    normalized.pop("type", None)
    return normalized


def _outer_theta(values: Values) -> Any:
    """Return the rope_theta outside the rotary settings or, if config.json gives none there, the model's default."""
    theta = values["rope_theta"]
    if theta is None:
        theta = 1e6 if values["model_type"] == "mixtral" else 10000.0
    return theta


def _attention_factor(factor: float, rope: Values, read_number: Callable[..., float]) -> float | None:
    """Return yarn's attention factor: attention_factor if given, else a value from mscale and mscale_all_dim.

    Returns None, which means yarn's default, if these keys are missing or 0, or if the context is not extended.
    """
    if rope.get("attention_factor") is not None:
        return read_number("attention_factor")
    # A factor up to 1 does not extend the context.
    if factor <= 1 or not rope.get("mscale") or not rope.get("mscale_all_dim"):
        return None
    # Each is yarn's attention scale 0.1 m ln(factor) + 1, with m = mscale or mscale_all_dim.
    log_factor = math.log(factor)
    numerator = 0.1 * read_number("mscale") * log_factor + 1.0
    denominator = 0.1 * read_number("mscale_all_dim") * log_factor + 1.0
    return numerator / denominator


def hf_rope_settings(m: ModelConfig) -> Settings:
    """Return our rotary settings as rope_theta and rope_scaling, the keys that all versions of transformers accept."""
    if m.rope_scaling is None:
        return {"rope_theta": m.rope_theta, "rope_scaling": None}
    scaling: Settings = {"rope_type": m.rope_scaling, "factor": m.rope_scaling_factor}
    if m.rope_scaling != "linear":
        scaling["original_max_position_embeddings"] = m.rope_original_length
    if m.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": m.rope_low_freq_factor, "high_freq_factor": m.rope_high_freq_factor}
    if m.rope_scaling == "yarn":
        scaling |= {"beta_fast": m.rope_beta_fast, "beta_slow": m.rope_beta_slow}
        if m.rope_attention_factor is not None:
            scaling["attention_factor"] = m.rope_attention_factor
    return {"rope_theta": m.rope_theta, "rope_scaling": scaling}

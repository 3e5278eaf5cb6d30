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
ANY_TYPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
# Type of rotary scaling -> keys that only some types use. All types accept the keys in ANY_TYPE.
READ_BY = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
KNOWN = {
    *(key for keys in READ_BY.values() for key in keys),
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
    "alpha",
}


def rope_settings(values: Values, where: Path) -> Settings:
    """Convert the values from `read_config` to our rotary settings by name. Raises ValueError for unsupported ones."""
    rope, at = _rope_and_key(values, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in READ_BY:
        raise ValueError(f"{where}: {at} has the scaling type {kind!r}; only {', '.join(READ_BY)} can be converted")
    if rope.get("type", kind) != kind:
        raise ValueError(f"{where}: {at} has type {rope['type']!r} but rope_type {kind!r}; they must be equal")
    for key in rope:
        if key in KNOWN and key not in (*ANY_TYPE, *READ_BY[kind]) and rope[key] is not None:
            raise ValueError(f"{where}: the key {key} of {at} has no effect with type {kind}; remove it from the file")

    def number(key: str, otherwise: float | None = None) -> float:
        value: Any = otherwise if rope.get(key) is None else rope[key]
        if type(value) not in (int, float):
            raise ValueError(f"{where}: {key} of {at} is {value!r}, not a number")
        return float(value)

    for key, usual in (("partial_rotary_factor", 1), ("truncate", True)):
        if rope.get(key, usual) != usual:
            raise ValueError(f"{where}: {key} of {at} is {rope[key]}; this project supports only {usual}")
    found: Settings = {"rope_theta": _theta(values, rope, at, where)}
    if kind == "default":
        return found
    original = number("original_max_position_embeddings", values["max_position_embeddings"])
    found |= {"rope_scaling": kind, "rope_scaling_factor": _factor(values, rope, kind, original, number)}
    if kind != "linear":
        found["rope_original_length"] = int(original)
    if kind == "llama3":
        found["rope_low_freq_factor"] = number("low_freq_factor")
        found["rope_high_freq_factor"] = number("high_freq_factor")
    if kind == "yarn":
        found |= {
            "rope_beta_fast": number("beta_fast", 32.0) or 32.0,
            "rope_beta_slow": number("beta_slow", 1.0) or 1.0,
        }
        found["rope_attention_factor"] = _attention_factor(found["rope_scaling_factor"], rope, number)
    return found


def _rope_and_key(values: Values, where: Path) -> tuple[Settings, str]:
    """Return (rotary settings, name of the key that holds them: rope_scaling or rope_parameters).

    Raises ValueError if both keys are set but differ, or if rope_parameters gives layers different settings.
    """
    old = values["rope_scaling"] or {}
    new = values["rope_parameters"] or {}
    if any(isinstance(value, dict) for value in new.values()):
        raise ValueError(f"{where}: rope_parameters differ between layers; such models cannot be converted")
    # With both keys, transformers 5 ignores rope_parameters and other programs ignore rope_scaling, so both must agree.
    if old and new:
        here = _in_full(old, values)
        there = _in_full(new, values)
        for key in (*here, *there):
            if here.get(key) != there.get(key):
                raise ValueError(
                    f"{where}: rope_scaling and rope_parameters must be equal, but {key} is {here.get(key)!r} in the "
                    f"former and {there.get(key)!r} in the latter; remove one of them from the file"
                )
    return (old, "rope_scaling") if old else (new, "rope_parameters")


def _in_full(rope: Values, values: Values) -> Settings:
    """Return `rope` in one form for comparison: with the scaling type as rope_type, and always with rope_theta."""
    outside = _usual_theta(values) if values["rope_theta"] is None else values["rope_theta"]
    rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
    return {"rope_type": rope.get("rope_type", rope.get("type", "default")), "rope_theta": outside, **rest}


def _usual_theta(values: Values) -> float:
    """Return the rope_theta of a model whose config.json gives none."""
    return 1e6 if values["model_type"] == "mixtral" else 10000.0


def _theta(values: Values, rope: Values, at: str, where: Path) -> float:
    """Return rope_theta, which may stand inside or outside the rotary settings."""
    inside = rope.get("rope_theta")
    outside = values["rope_theta"]
    if None not in (inside, outside) and inside != outside:
        raise ValueError(f"{where}: rope_theta is {outside}, but in {at} it is {inside}")
    found = outside if inside is None else inside
    if found is None:
        found = _usual_theta(values)
    if type(found) not in (int, float):
        raise ValueError(f"{where}: rope_theta of {at} is {found!r}, not a number")
    return float(found)


def _factor(values: Values, rope: Values, kind: str, original: float, number: Callable[..., float]) -> float:
    """Return the factor by which scaling extends the context.

    For yarn, a factor of null means max_position_embeddings / `original`.
    """
    if kind == "yarn" and rope.get("factor", 0) is None:
        return float(values["max_position_embeddings"] / original)
    return number("factor")


def _attention_factor(factor: float, rope: Values, number: Callable[..., float]) -> float | None:
    """Return yarn's attention factor: attention_factor if given, else a value from mscale and mscale_all_dim.

    Returns None, which means yarn's default, if these keys are missing.
    """
    if rope.get("attention_factor") is not None:
        return number("attention_factor")
    if factor <= 1 or not rope.get("mscale") or not rope.get("mscale_all_dim"):
        return None
    above = 0.1 * number("mscale") * math.log(factor) + 1.0
    below = 0.1 * number("mscale_all_dim") * math.log(factor) + 1.0
    return above / below


def their_rope(m: ModelConfig) -> Settings:
    """Return our rotary settings as rope_theta and rope_scaling, the keys that all versions of transformers accept."""
    if m.rope_scaling is None:
        return {"rope_theta": m.rope_theta, "rope_scaling": None}
    found: Settings = {"rope_type": m.rope_scaling, "factor": m.rope_scaling_factor}
    if m.rope_scaling != "linear":
        found["original_max_position_embeddings"] = m.rope_original_length
    if m.rope_scaling == "llama3":
        found |= {"low_freq_factor": m.rope_low_freq_factor, "high_freq_factor": m.rope_high_freq_factor}
    if m.rope_scaling == "yarn":
        found |= {"beta_fast": m.rope_beta_fast, "beta_slow": m.rope_beta_slow}
        if m.rope_attention_factor is not None:
            found["attention_factor"] = m.rope_attention_factor
    return {"rope_theta": m.rope_theta, "rope_scaling": found}

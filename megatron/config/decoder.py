"""Decoder settings beyond GPT-2: rotary positions, grouped-query attention, QK norm, QKV biases, sliding window.

Llama, Qwen and Mistral combine these settings with the settings that all models share (`ModelConfig`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .experts import ExpertsConfig
from .fields import at_least, between, flag, more_than, one_of, opt, problems_where

LLAMA = ("llama",)
SCALINGS = ("linear", "llama3", "yarn")
# Method of --rope-scaling -> the parameters that the method uses, by their field names in `DecoderConfig`.
_METHOD_SETTINGS = {
    "linear": ("rope_scaling_factor",),
    "llama3": ("rope_scaling_factor", "rope_original_length", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": (
        "rope_scaling_factor", "rope_original_length", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ExpertsConfig):
    """Settings of a decoder that GPT-2 does not have. `ModelConfig` inherits them, so their section is `model`."""

    num_key_value_heads: int | None = opt(
        None,
        "number of key/value heads in grouped-query attention; --num-attention-heads if not given",
        at_least(1),
        family=LLAMA,
    )
    qkv_bias: bool | None = opt(
        None,
        "biases in the projections to queries, keys and values; the value of --hidden-bias if not given",
        family=LLAMA,
    )
    qk_norm: bool = opt(False, "apply an RMS norm to each head of queries and keys before their rotation", family=LLAMA)
    sliding_window: int | None = opt(
        None,
        "number of tokens to which a token attends: itself and the tokens just before it; all earlier tokens if not "
        "given or none",
        at_least(1),
        family=LLAMA,
    )
    rope_theta: float = opt(
        10000.0, "rotary positions: base of the geometric series of wavelengths", at_least(1), family=LLAMA
    )
    rotary_percent: float = opt(
        1.0, "rotary positions: share of each head's dimensions that are rotated", between(0, 1), family=LLAMA
    )
    rope_scaling: str | None = opt(
        None,
        f"method that scales rotary positions for longer contexts: {', '.join(SCALINGS)}, or none",
        one_of(*SCALINGS),
        family=LLAMA,
    )
    rope_scaling_factor: float = opt(
        1.0, "factor by which --rope-scaling extends the context length", at_least(1), family=LLAMA
    )
    rope_original_length: int | None = opt(
        None, "with --rope-scaling llama3 or yarn: context length before scaling", at_least(1), family=LLAMA
    )
    rope_low_freq_factor: float = opt(
        1.0,
        "with --rope-scaling llama3: dimensions that rotate fewer times than this over --rope-original-length tokens "
        "are fully scaled",
        more_than(0),
        family=LLAMA,
    )
    rope_high_freq_factor: float = opt(
        4.0,
        "with --rope-scaling llama3: dimensions that rotate more times than this over --rope-original-length tokens "
        "are not scaled",
        at_least(0),
        family=LLAMA,
    )
    rope_beta_fast: float = opt(
        32.0,
        "with --rope-scaling yarn: dimensions that rotate more times than this over --rope-original-length tokens are "
        "not scaled",
        family=LLAMA,
    )
    rope_beta_slow: float = opt(
        1.0,
        "with --rope-scaling yarn: dimensions that rotate fewer times than this over --rope-original-length tokens "
        "are fully scaled",
        family=LLAMA,
    )
    rope_attention_factor: float | None = opt(
        None,
        "with --rope-scaling yarn: factor that multiplies queries and keys; 0.1 ln(--rope-scaling-factor) + 1 if not "
        "given",
        at_least(0),
        family=LLAMA,
    )

    def _problems(self) -> Iterator[str]:
        """Yield an error text for --rope-scaling parameters that are invalid or that the method ignores."""
        yield from super()._problems()
        method = self.rope_scaling
        used = _METHOD_SETTINGS.get(method or "", ())  # () without a method
        unused = unused_rope_settings(vars(self), method)
        names = ", ".join(map(flag, unused))
        low = self.rope_low_freq_factor
        high = self.rope_high_freq_factor
        slow = self.rope_beta_slow
        fast = self.rope_beta_fast
        yield from problems_where(
            (unused, f"{names}: not used by --rope-scaling {method or '(none)'}; leave out {names}"),
            (
                "rope_original_length" in used and self.rope_original_length is None,
                f"--rope-scaling {method} needs --rope-original-length",
            ),
            (
                method == "llama3" and high <= low,
                f"--rope-high-freq-factor {high:g} must be more than --rope-low-freq-factor {low:g}",
            ),
            (
                method == "yarn" and self.rope_theta <= 1,
                f"--rope-theta {self.rope_theta:g} must be more than 1 with --rope-scaling yarn",
            ),
            (
                method == "yarn" and not fast > slow > 0,
                f"--rope-beta-fast {fast:g} must be more than --rope-beta-slow {slow:g}, which must be more than 0",
            ),
        )


# Settings that, together with the number of rotated dimensions, determine the rotary angles.
ANGLE_SETTINGS = tuple(name for name in DecoderConfig.__dataclass_fields__ if name.startswith("rope_"))


def unused_rope_settings(values: Mapping[str, Any], scaling: object) -> list[str]:
    """Return the non-default rotary parameters in `values` that the --rope-scaling method `scaling` ignores."""
    parameters = set[str]().union(*_METHOD_SETTINGS.values())  # of all methods
    ignored = parameters.difference(_METHOD_SETTINGS.get(str(scaling), ()))  # all of them if there is no method
    unused = []
    for name, field in DecoderConfig.__dataclass_fields__.items():
        is_changed = values.get(name, field.default) != field.default  # a file may leave settings out
        if name in ignored and is_changed:
            unused.append(name)
    return unused

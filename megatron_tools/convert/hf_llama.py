"""Import and export of config.json for Llama, Qwen, Mistral and Mixtral, which share one decoder in this project.

The families differ in what they support: biases in all linear layers (Llama), biases for queries, keys and values
(Qwen2), query and key norms (Qwen3), and sliding windows (in all layers of Mistral, in any layer of Qwen2 and Qwen3).
Mixtral, Qwen2-MoE and Qwen3-MoE add mixtures of experts, whose keys are in `hf_experts.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig

from .hf_experts import EXPERT_DEFAULTS, expert_config, expert_settings, unsupported_settings
from .hf_keys import DTYPES, Family, gated_activation_of, hf_values, our_settings, refuse_unsupported
from .hf_rope import hf_rope_settings, rope_settings

Values = Mapping[str, Any]  # the content of a config.json
# An import sets --seq-length for further training to the model's number of positions, but at most to this number.
MAX_LENGTH = 4096
_COMMON_DEFAULTS = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_dropout": 0.0, "rope_theta": None, "rope_scaling": None,
    "rope_parameters": None,
    "pad_token_id": None, "head_dim": None, "is_encoder_decoder": False,
    "decoder_start_token_id": None, "vocab_size": 32000, "eos_token_id": 2,
}  # fmt: skip
_QWEN_DEFAULTS = {
    **_COMMON_DEFAULTS, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
    "eos_token_id": None,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON_DEFAULTS, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False, "mlp_bias": False,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    "mistral": {
        **_COMMON_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096, "layer_types": None,
    },
    "mixtral": {
        **_COMMON_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "sliding_window": None, **EXPERT_DEFAULTS["mixtral"],
    },
    "qwen2_moe": {
        **_QWEN_DEFAULTS, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "hidden_size": 2048, "intermediate_size": 5632, "qkv_bias": True, **EXPERT_DEFAULTS["qwen2_moe"],
    },
    "qwen3_moe": {
        **{key: value for key, value in _QWEN_DEFAULTS.items() if key != "layer_types"}, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 6144, "attention_bias": False,
        "max_window_layers": None,  # published files contain this key, which the class does not read
        **EXPERT_DEFAULTS["qwen3_moe"],
    },
}  # fmt: skip
# Our setting -> the key of config.json that has the same value.
LLAMA_NAMES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads", "kv_hidden_size": "head_dim", "ff_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps", "attention_dropout": "attention_dropout",
}  # fmt: skip
CLASS_PREFIXES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
_ALIASES = {"mixtral": {"num_experts": "num_local_experts"}, "qwen3_moe": {"num_local_experts": "num_experts"}}
FAMILIES = {
    kind: Family(f"{name}ForCausalLM", (f"{name}ForCausalLM", f"{name}Model"), _DEFAULTS[kind], _ALIASES.get(kind, {}))
    for kind, name in CLASS_PREFIXES.items()
}


def training_length(positions: int) -> tuple[int, list[str]]:
    """Return (--seq-length for further training of a model with `positions` positions, notes for the user)."""
    if positions <= MAX_LENGTH:
        return positions, []
    note = f"the model has {positions} positions; settings.json sets --seq-length {MAX_LENGTH} for further training"
    return MAX_LENGTH, [note]


def llama_settings(values: Values, tied: bool, where: Path) -> tuple[dict[str, Any], list[str]]:
    """Convert the values from `read_config` to (our settings by name, notes for the user)."""
    hidden_bias, qkv_bias = _biases(values, where)
    seq_length, notes = training_length(values["max_position_embeddings"])
    moe_settings: dict[str, Any] = {}
    if values["model_type"] in EXPERT_DEFAULTS:
        moe_settings, expert_notes = expert_settings(values, where)
        notes += expert_notes
    return {
        **our_settings(LLAMA_NAMES, values), "family": "llama", "seq_length": seq_length,
        "hidden_dropout": 0.0, "tie_embeddings": tied,
        "activation": gated_activation_of(values["hidden_act"], where, "hidden_act"),
        "position_embedding": "rope",
        "normalization": "rmsnorm", "hidden_bias": hidden_bias, "qkv_bias": qkv_bias,
        "qk_norm": values["model_type"].startswith("qwen3"), "sliding_window": _sliding_window(values, where),
        **rope_settings(values, where), **moe_settings,
    }, notes  # fmt: skip


def _biases(values: Values, where: Path) -> tuple[bool, bool]:
    """Return (bias in all linear layers, bias in the query, key and value projection)."""
    if values["model_type"] in ("qwen2", "qwen2_moe"):
        return False, values.get("qkv_bias", True)
    attention = values.get("attention_bias", False)
    mlp = values.get("mlp_bias", False)
    if attention != mlp:
        # A Qwen3 has no key mlp_bias that the message could name.
        other_bias = "" if values["model_type"].startswith("qwen3") else f" and mlp_bias {mlp}"
        raise ValueError(
            f"{where}: attention_bias is {attention}{other_bias}; a model must have biases in all linear layers or in "
            f"none; only Qwen2 and Qwen2-MoE may have them in queries, keys and values alone"
        )
    return attention, attention


def _sliding_window(values: Values, where: Path) -> int | None:
    """Return the sliding window in tokens, or None for full attention.

    Raises ValueError if only some of the layers have a window.
    """
    # Llama has no such key.
    if "sliding_window" not in values:
        return None
    num_layers = values["num_hidden_layers"]
    window = values["sliding_window"]
    if not values.get("use_sliding_window", True):
        window = None
    layer_types = values.get("layer_types")
    if layer_types is None:
        layer_types = _default_layer_types(values, window, where)
    are_uniform = len(layer_types) == num_layers and len(set(layer_types)) == 1
    if not are_uniform or layer_types[0] not in ("full_attention", "sliding_attention"):
        raise ValueError(
            f"{where}: layer_types (or max_window_layers {values.get('max_window_layers')}) must give all {num_layers} "
            f"layers the same attention, full_attention or sliding_attention; other models cannot be converted"
        )
    is_sliding = layer_types[0] == "sliding_attention"
    # A Qwen may give a window that no layer uses. Mistral has no key that disables its window, so all layers use it.
    expects_window = window is not None and "use_sliding_window" not in values
    lacks_window = is_sliding and window is None
    has_unused_window = not is_sliding and expects_window
    if lacks_window or has_unused_window:
        raise ValueError(f"{where}: all layer_types are {layer_types[0]}, but sliding_window is {window}")
    return window if is_sliding else None


def _default_layer_types(values: Values, window: int | None, where: Path) -> list[str]:
    """Return layer_types as the model's class derives it from the other keys, if the file lacks it."""
    model_type = values["model_type"]
    num_layers = values["num_hidden_layers"]
    if window is None:
        return ["full_attention"] * num_layers
    num_full_layers = values.get("max_window_layers", 0)  # Mistral has no such key, and a window in all layers
    if model_type == "qwen3_moe":
        num_full_layers = 0  # its class does not read max_window_layers
    if num_full_layers is None:
        raise ValueError(
            f"{where}: max_window_layers is null; set it to the number of layers without a sliding window, or list "
            f"the layers in layer_types"
        )
    layer_types = []
    for layer in range(num_layers):
        is_sliding = layer >= num_full_layers
        if model_type == "qwen2_moe":  # its class gives every second of the first `num_full_layers` layers a window
            is_sliding = layer < num_full_layers and layer % 2 == 0
        layer_types.append("sliding_attention" if is_sliding else "full_attention")
    return layer_types


def llama_config(m: ModelConfig, positions: int, bos_id: int, eod_id: int, dtype: str) -> dict[str, Any]:
    """Return a config.json for the family that supports the settings `m`. Raises ConfigError if no family does."""
    model_type = _family_for(m)
    refuse_unsupported([  # (whether `m` uses it, flag)
        (m.normalization != "rmsnorm", f"--normalization {m.normalization}"),
        (not m.is_gated, f"--activation {m.activation}"),
        (m.rotary_size != m.head_size, f"--rotary-percent {m.rotary_percent:g}"),
        (not m.scale_attention, "--no-scale-attention"),
        # Llama has biases in all linear layers or in none. Qwen2 has them in queries, keys and values alone, Qwen2-MoE
        # there or nowhere, and the others have none. `_family_for` never returns qwen2 for a model with --hidden-bias.
        (model_type not in ("llama", "qwen2") and m.hidden_bias, "--hidden-bias"),
        (model_type in ("qwen3", "qwen3_moe", "mixtral") and m.has_qkv_bias, "--qkv-bias"),
        (model_type == "llama" and m.hidden_bias != m.has_qkv_bias, "--no-qkv-bias"),
        *unsupported_settings(m, model_type),
    ], CLASS_PREFIXES[model_type])  # fmt: skip
    content = {
        "architectures": [FAMILIES[model_type].class_name], "model_type": model_type, **hf_values(LLAMA_NAMES, m),
        "intermediate_size": m.ff_size, "num_key_value_heads": m.key_value_heads, "head_dim": m.head_size,
        "hidden_act": "silu" if m.activation == "swiglu" else "gelu_pytorch_tanh", "max_position_embeddings": positions,
        "initializer_range": m.init_method_std, "tie_word_embeddings": m.tie_embeddings,
        "bos_token_id": bos_id, "eos_token_id": eod_id, **hf_rope_settings(m),
        "dtype": DTYPES[dtype],
    }  # fmt: skip
    # Only the biases of Llama and Qwen2-MoE vary from model to model. All families except Llama may have a window.
    if model_type == "llama":
        content |= {"attention_bias": m.hidden_bias, "mlp_bias": m.hidden_bias}
    elif model_type in ("mistral", "mixtral"):
        content |= {"sliding_window": m.sliding_window}
    else:
        has_window = m.sliding_window is not None
        content |= {
            "use_sliding_window": has_window,
            "sliding_window": m.sliding_window,
            # The first max_window_layers layers of a Qwen2 or Qwen3 have no window.
            "max_window_layers": 0 if has_window else m.num_layers,
        }
        # Without layer_types, the class of Qwen2-MoE would derive other layers (see `_default_layer_types`).
        if model_type == "qwen2_moe":
            layer_type = "sliding_attention" if has_window else "full_attention"
            content |= {"qkv_bias": m.has_qkv_bias, "layer_types": [layer_type] * m.num_layers}
    return content | expert_config(m, model_type)


def _family_for(m: ModelConfig) -> str:
    """Return the Hugging Face family for these settings: Llama if possible, because most programs support Llama.

    Llama's class requires hidden_size to be divisible by the number of heads; Mistral's does not.
    """
    # Only the Qwen3 families have norms of queries and keys. Only the Qwen2 families have shared experts, or biases for
    # queries, keys and values alone.
    if m.num_experts is not None:
        if m.qk_norm:
            return "qwen3_moe"
        return "qwen2_moe" if m.num_shared_experts else "mixtral"
    if m.qk_norm:
        return "qwen3"
    if m.has_qkv_bias and not m.hidden_bias:
        return "qwen2"
    if m.sliding_window is not None or m.hidden_size % m.num_attention_heads:
        return "mistral"
    return "llama"

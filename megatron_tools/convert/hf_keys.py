"""What all Hugging Face model families share: config.json keys without effect, value types, activation names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.config.fields import ConfigError
from megatron.tokenizer.sibling_files import GENERATION_KEYS

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Hugging Face's name of an activation -> our name. Only the listed activations have an equivalent in this project.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh", "gelu_python_tanh": "gelu-tanh", "relu": "relu",
}  # fmt: skip
# Keys without effect on the logits. They describe training, generation, heads for other tasks, files or labels.
IGNORED_KEYS = frozenset(
    [
        "architectures",
        "model_type",
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "return_dict",
        "return_dict_in_generate",
        "output_hidden_states",
        "output_attentions",
        "output_scores",
        "output_past",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "task_specific_params",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "initializer_range",
        "initializer_factor",
        "gradient_checkpointing",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "tokenizer_class",
        "prefix",
        "pretraining_tp",
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "classifier_dropout",
        *GENERATION_KEYS,
        "sep_token_id",
        "bos_token_id",
        "chunk_size_feed_forward",
        "reorder_and_upcast_attn",
    ]
)
# Keys that change the computation, each with the only value that our models support. Null means false.
REQUIRED_VALUES: dict[str, Any] = {
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "is_decoder": False,
    "tie_encoder_decoder": False, "is_causal": True,
    "cross_attention_hidden_size": None, "pruned_heads": {}, "use_mrope": False,
}  # fmt: skip
# Keys found in re-uploaded models and in conversions between families. Some match SUSPECT_KEYS, but no Hugging Face
# class of a supported family reads them. Keys among the defaults of a family are read.
UNREAD_KEYS = re.compile(
    r"_num_labels|is_llama_config|max_sequence_length|finetuned|auto_map|scalable_attention|n_special"
    r"|predict_special_tokens|transformers\.js_config|unsloth_\w+|_?\w*flash_attn\w*|sdpa\w*"
    r"|(layer_?norm|rms_?norm|norm)_eps(ilon)?|max_window_layers"
)
# Parts of key names. An unknown key that contains one is refused, because in other model families such keys change
# what the model computes. test_hf_keys.py checks this list against transformers.
SUSPECT_KEYS = re.compile(
    r"rope|rotary|alibi|att|attn|window|bias|norm|scal|multipl|factor|cap|expert|moe|rout|layer|head|pos_|position"
    r"|residual|emb|act|gat|mlp|ffn|ff_|kv|qk|quant|hidden|ratio|percent|pct|conv|ssm|state|mamba|rank|lora|dim"
    r"|size|block|stride|kernel|num_|n_|theta|query|key|eps|tie|memory|mem_|mix|chunk|local|global|span|bucket"
    r"|group|depth|width|channel|interleav|drop|prob|rate|swiglu|glu|dense|causal|mup|decoder|encoder|linear"
    r"|sparse|clamp|clip|limit|temperature|index|share|use_|weight|alpha|beta|hc_|prefix_lm|expand|_pos|max_period"
    r"|sinusoid|cycles|d_|latent|mult|altup|first_k|lower_bound|type$|jitter|patch|dff|scoring|method|_config"
    r"|time_step|afn|sink|rel_|relative|ngram|enable|concat|asm|bi_data|same_length|^mode$|cca|hash|segment"
)
NEUTRAL_AT_1 = re.compile(r"scal|multipl|factor|ratio|percent|pct")
# Keys whose value may be null, and the type of their other values.
NULLABLE_TYPES: dict[str, type] = {
    **dict.fromkeys((
        "n_inner", "pad_token_id", "eos_token_id", "decoder_start_token_id", "num_decoder_layers", "n_positions",
        "num_key_value_heads", "head_dim", "sliding_window", "max_window_layers",
    ), int),
    "dense_act_fn": str, "is_gated_act": bool, "scale_decoder_outputs": bool, "tie_word_embeddings": bool,
    "is_encoder_decoder": bool,
    "layer_types": list, "rope_theta": float, "rope_scaling": dict, "rope_parameters": dict,
    "mlp_only_layers": list,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A Hugging Face model family: its class, supported keys with their defaults, and aliases of keys.

    ignored: regular expressions for the names of tensors that old files contain but no class reads; from the attribute
    `_keys_to_ignore_on_load_unexpected` of transformers' classes.
    """

    class_name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    ignored: tuple[str, ...] = ()


def our_settings(names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings that have the values of keys of a config.json. names: our setting -> their key."""
    return {ours: values[theirs] for ours, theirs in names.items()}


def hf_values(names: Mapping[str, str], m: ModelConfig) -> dict[str, Any]:
    """Return the keys of a config.json that have the values of our settings, the reverse of `our_settings`."""
    return {theirs: getattr(m, ours) for ours, theirs in names.items()}


def is_disabled(key: str, value: Any) -> bool:
    """Return whether the value disables the key's feature: it is null, false, zero, empty, or a factor of 1."""
    # One name for each layer. Full attention is what a layer has without this key.
    if key == "layer_types":
        return isinstance(value, list) and set(value) <= {"full_attention"}
    if not value:
        return True
    is_one = value == 1 and value is not True  # True equals 1, but a switch that is on does not disable anything
    return is_one and NEUTRAL_AT_1.search(key) is not None


def has_no_effect(key: str) -> bool:
    """Return whether a key has no effect, judged by its name. Call this for keys that the family does not support."""
    # SUSPECT_KEYS matches names that could change the computation, and UNREAD_KEYS lists its harmless exceptions.
    return UNREAD_KEYS.fullmatch(key) is not None or SUSPECT_KEYS.search(key.lower()) is None


def check_type(key: str, value: Any, default: Any, nullable_type: type | None, where: Path) -> None:
    """Raise ValueError if the value has another type than the default, or `nullable_type` if the default is null.

    nullable_type: the key's type in NULLABLE_TYPES, whose keys may be null; None for other keys.
    """
    wanted = nullable_type if default is None else type(default)
    may_be_null = default is None or nullable_type is not None
    # Without a default or a listed type, any value passes.
    if wanted is None:
        return
    if value is None and may_be_null:
        return
    # JSON may write 1.0 as 1, and eos_token_id may list several ids.
    accepted = (float, int) if wanted is float else (wanted,)
    values = value if key == "eos_token_id" and isinstance(value, list) else [value]
    # type() instead of isinstance(): a bool is no number here.
    if all(type(each) in accepted for each in values):
        return
    raise ValueError(f"{where}: {key} is {value!r}, not of type {wanted.__name__}")


def activation_of(name: str, where: Path, key: str) -> str:
    """Return our name for the Hugging Face activation `name`. Raises ValueError if we have no equivalent."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{where}: {key} is {name}; only {', '.join(ACTIVATIONS)} can be converted")
    return ACTIVATIONS[name]


def gated_activation_of(name: str, where: Path, key: str) -> str:
    """Return our name for a gated MLP whose gate has the Hugging Face activation `name`.

    Raises ValueError if we have no equivalent.
    """
    if name in ("silu", "swish"):
        return "swiglu"
    if ACTIVATIONS.get(name) == "gelu-tanh":
        return "gated-gelu"
    gelus = ", ".join(hf_name for hf_name, ours in ACTIVATIONS.items() if ours == "gelu-tanh")
    raise ValueError(f"{where}: {key} is {name}; of gated MLPs only those with silu, swish, {gelus} can be converted")


def refuse_unsupported(what: Sequence[tuple[bool, str]], model: str) -> None:
    """Raise ConfigError for the first setting that Hugging Face's class for `model` does not support.

    what: pairs of (whether our model uses the unsupported setting, the setting's flag).
    """
    for wrong, setting in what:
        if wrong:
            raise ConfigError(f"Hugging Face's {model} does not support {setting}")

"""Conversion of Hugging Face's config.json: each key is converted, is ignored because it has no effect, or is refused.

The tables list each model family's default values, because a config.json may omit them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig

from . import hf_llama
from .hf_keys import (
    DTYPES,
    IGNORED_KEYS,
    NULLABLE_TYPES,
    REQUIRED_VALUES,
    Family,
    activation_of,
    check_type,
    gated_activation_of,
    has_no_effect,
    hf_values,
    is_disabled,
    our_settings,
    refuse_unsupported,
)

Values = Mapping[str, Any]  # the content of a config.json
_T5_DEFAULTS = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
    "num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "dense_act_fn": None, "is_gated_act": None,
    "tie_word_embeddings": True, "scale_decoder_outputs": None, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": None, "is_encoder_decoder": True, "n_positions": None,
}  # fmt: skip
_MT5_DEFAULTS = {
    **_T5_DEFAULTS, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
_T5_ALIASES = {
    "hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers", "head_dim": "d_kv",
}  # fmt: skip
# T5 checkpoints from 2019 contain this tensor, which the model does not use.
_UNUSED_TENSORS = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
        {
            "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
            "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True, "eos_token_id": 50256,
            "pad_token_id": None, "is_encoder_decoder": False, "decoder_start_token_id": None,
        },
        {
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        ("attn.bias", "crossattention.bias"),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model"),
        _T5_DEFAULTS,
        _T5_ALIASES,
        _UNUSED_TENSORS,
    ),
    "mt5": Family(
        "MT5ForConditionalGeneration",
        ("MT5ForConditionalGeneration", "T5ForConditionalGeneration", "MT5Model"),
        _MT5_DEFAULTS,
        _T5_ALIASES,
        _UNUSED_TENSORS,
    ),
    "umt5": Family(
        "UMT5ForConditionalGeneration",
        ("UMT5ForConditionalGeneration", "UMT5Model"),
        _MT5_DEFAULTS,
        _T5_ALIASES,
    ),
    **hf_llama.FAMILIES,
}  # fmt: skip

# Our setting -> the key of config.json that has the same value.
GPT2_NAMES = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head", "ff_hidden_size": "n_inner",
    "vocab_size": "vocab_size", "max_position_embeddings": "n_positions", "layernorm_epsilon": "layer_norm_epsilon",
    "hidden_dropout": "resid_pdrop", "attention_dropout": "attn_pdrop", "scale_attention": "scale_attn_weights",
}  # fmt: skip
T5_NAMES = {
    "num_layers": "num_layers", "num_decoder_layers": "num_decoder_layers", "hidden_size": "d_model",
    "num_attention_heads": "num_heads", "kv_hidden_size": "d_kv", "ff_hidden_size": "d_ff", "vocab_size": "vocab_size",
    "relative_attention_num_buckets": "relative_attention_num_buckets",
    "relative_attention_max_distance": "relative_attention_max_distance", "layernorm_epsilon": "layer_norm_epsilon",
    "hidden_dropout": "dropout_rate",
}  # fmt: skip


def read_config(content: Values, where: Path) -> dict[str, Any]:
    """Return a value for each key of the model family: the value in `content`, else the default.

    An alias in `content` sets the key that it stands for. Raises ValueError for an unknown model type, an
    unknown key, or a value that our models do not support.
    """
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{where}: model_type is {model_type!r}; only {', '.join(FAMILIES)} can be converted")
    family = FAMILIES[model_type]
    architectures = content.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"{where}: architectures must be a list of names, not {architectures!r}")
    for name in architectures:
        if name not in family.architectures:
            raise ValueError(
                f"{where}: architectures names {name}; for model_type {model_type}, only "
                f"{' and '.join(family.architectures)} can be converted"
            )
    values = dict(family.defaults)
    set_by: dict[str, str] = {}  # key of the family -> the key or alias in the file that has set it
    for key, value in content.items():
        name = family.aliases.get(key, key)
        if name in values:
            if name in set_by and values[name] != value:
                raise ValueError(f"{where}: {set_by[name]} is {values[name]}, but its alias {key} is {value}")
            check_type(key, value, family.defaults[name], NULLABLE_TYPES.get(name), where)
            set_by[name] = key
            values[name] = value
        elif name in REQUIRED_VALUES:
            required = REQUIRED_VALUES[name]
            is_supported = value == required or (value is None and not required)  # null means false
            if not is_supported:
                raise ValueError(f"{where}: {key} is {value}; this project supports only {required}")
        # What is left is unknown. It is harmless if its value turns it off, or if no model reads such a key.
        elif name not in IGNORED_KEYS and not is_disabled(key, value) and not has_no_effect(key):
            raise ValueError(
                f"{where}: the key {key} ({value!r}) is unknown and may change what the model computes; if it does "
                f"not, remove it from the file"
            )
    expected = family.defaults["is_encoder_decoder"]
    if values["is_encoder_decoder"] not in (expected, None):
        raise ValueError(
            f"{where}: is_encoder_decoder is {values['is_encoder_decoder']}, but {model_type} needs {expected}"
        )
    # A null in the file means false. After these lines, None means that the file lacks the key; see `_scales_logits`.
    if "scale_decoder_outputs" in set_by:
        values["scale_decoder_outputs"] = bool(values["scale_decoder_outputs"])
    return values | {"model_type": model_type}


def unread_keys(content: Values) -> list[str]:
    """Return the keys of a config.json that `read_config` ignores because no model class reads them.

    Keys whose value disables a feature, such as false, are left out.
    """
    family = FAMILIES[content["model_type"]]
    known = {*family.defaults, *family.aliases, *REQUIRED_VALUES, *IGNORED_KEYS}
    unread = []
    for key, value in content.items():
        if key not in known and not is_disabled(key, value):
            unread.append(key)
    return unread


def settings_from_hf(values: Values, tied: bool, where: Path) -> tuple[dict[str, Any], list[str]]:
    """Convert the values from `read_config` to (our settings by name, notes for the user).

    tied: whether input and output embedding are one matrix. Raises ValueError for unsupported settings.
    """
    if values["model_type"] in hf_llama.FAMILIES:
        return hf_llama.llama_settings(values, tied, where)
    if values["model_type"] == "gpt2":
        seq_length, notes = hf_llama.training_length(values["n_positions"])
        if values["embd_pdrop"] != values["resid_pdrop"]:
            notes.append(
                f"embd_pdrop {values['embd_pdrop']} differs from resid_pdrop {values['resid_pdrop']}; further training "
                f"replaces both by --hidden-dropout {values['resid_pdrop']}"
            )
        activation = activation_of(values["activation_function"], where, "activation_function")
        return {
            **our_settings(GPT2_NAMES, values), "family": "gpt2", "seq_length": seq_length,
            "tie_embeddings": tied, "activation": activation,
        }, notes  # fmt: skip
    # T5, mT5 and UMT5. For further training, the encoder gets 512 tokens, as in the T5 paper (Raffel et al. 2020).
    return {
        **our_settings(T5_NAMES, values), "family": "t5", "attention_dropout": values["dropout_rate"],
        "activation": _t5_activation(values, where), "tie_embeddings": tied,
        "scale_tied_logits": _scales_logits(values), "relative_attention_per_layer": values["model_type"] == "umt5",
        "position_embedding": "relative", "normalization": "rmsnorm",
        "hidden_bias": False, "scale_attention": False, "enc_seq_length": 512, "span_convention": "t5",
    }, []  # fmt: skip


def _t5_activation(values: Values, where: Path) -> str:
    """Return our name of a T5's activation.

    The key feed_forward_proj gives it in the form X or gated-X; is_gated_act and dense_act_fn override this key.
    """
    key = "feed_forward_proj"  # the key that an error message names
    feed_forward = values[key]
    name = feed_forward.removeprefix("gated-")
    if feed_forward == "gated-gelu":
        name = "gelu_new"  # T5 v1.1 writes gated-gelu but means GELU with tanh
    if values["dense_act_fn"] is not None:
        key = "dense_act_fn"
        # An empty dense_act_fn leaves the name of feed_forward_proj.
        name = values[key] or name
    is_gated = values["is_gated_act"]
    if is_gated is None:
        is_gated = feed_forward.startswith("gated-")
    convert = gated_activation_of if is_gated else activation_of
    return convert(name, where, key)


def _scales_logits(values: Values) -> bool:
    """Return whether the model scales its logits if the embeddings are tied.

    mT5 never scales logits. For T5 and UMT5, scale_decoder_outputs decides, or tie_word_embeddings if
    scale_decoder_outputs is missing.
    """
    if values["model_type"] == "mt5":
        return False
    scaled = values["scale_decoder_outputs"]
    if scaled is None:
        return values["tie_word_embeddings"] is not False
    return bool(scaled)


def logit_scale_notes(m: ModelConfig) -> list[str]:
    """Return the note on releases of transformers that scale the logits of this T5, although it does not scale them."""
    releases = []
    if m.tie_embeddings:
        releases.append("transformers 4")
    if m.relative_attention_per_layer:  # a UMT5, tied or not
        releases.append("transformers 5.0 to 5.23")
    if m.family != "t5" or m.scale_tied_logits or not releases:
        return []
    return [f"the logits are not scaled (scale_decoder_outputs false); {' and '.join(releases)} would scale them"]


def check_tokenizer(values: Values, given: Values, tokenizer: Any, where: Path) -> list[str]:
    """Compare `tokenizer` with the model's config.json and return notes for the user.

    values: config.json with defaults filled in. given: config.json as it is. Raises ValueError if the tokenizer has
    more tokens than the model, if it contradicts the files next to it, or if the two differ in the ids of the end,
    padding or start token.
    """
    tokenizer.refuse_contradiction()
    if tokenizer.vocab_size > values["vocab_size"]:
        raise ValueError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, more than vocab_size {values['vocab_size']}"
        )
    end_ids = values["eos_token_id"]
    if not isinstance(end_ids, list):
        end_ids = [end_ids]
    # The tokenizer's end must be among the ids that the file gives. A default, which the file does not give, and ids
    # outside the vocabulary say nothing about the tokenizer.
    valid_ids = [end_id for end_id in end_ids if end_id is not None and end_id < values["vocab_size"]]
    if "eos_token_id" in given and valid_ids and tokenizer.eod not in end_ids:
        raise ValueError(
            f"{where}: eos_token_id is {values['eos_token_id']}, but the tokenizer ends texts with {tokenizer.eod}"
        )
    notes = []
    if len(end_ids) > 1:
        notes = [f"eos_token_id lists {end_ids}; in this project only {tokenizer.eod} ends a document"]
    # Only a decoder with an encoder begins with the padding token, so only its ids must agree.
    if not FAMILIES[values["model_type"]].defaults["is_encoder_decoder"]:
        return notes
    if values["pad_token_id"] != tokenizer.pad:
        raise ValueError(
            f"{where}: pad_token_id is {values['pad_token_id']}, but the tokenizer pads with {tokenizer.pad}"
        )
    start_id = values["decoder_start_token_id"]
    if start_id not in (None, tokenizer.pad):
        raise ValueError(
            f"{where}: decoder_start_token_id is {start_id}, but this project's decoders start with the "
            f"padding token {tokenizer.pad}"
        )
    return notes


def gpt2_config(m: ModelConfig, positions: int, start: int, eod: int, dtype: str) -> dict[str, Any]:
    """Return the config.json for GPT2LMHeadModel. Raises ConfigError for settings that this class does not support.

    start, eod: ids of the token before each text and of the end-of-document token.
    """
    refuse_unsupported([
        (m.num_experts is not None, f"--num-experts {m.num_experts}"),
        (m.normalization != "layernorm", f"--normalization {m.normalization}"),
        (m.is_gated, f"--activation {m.activation}"),
        (m.position_embedding != "learned", f"--position-embedding {m.position_embedding}"),
        (m.key_value_heads != m.num_attention_heads, f"--num-key-value-heads {m.key_value_heads}"),
        (m.qk_norm, "--qk-norm"),
        (m.sliding_window is not None, f"--sliding-window {m.sliding_window}"),
        (m.has_qkv_bias != m.hidden_bias, "--no-qkv-bias"),
        (not m.hidden_bias, "--no-hidden-bias"),
        (m.head_size * m.num_attention_heads != m.hidden_size, f"--kv-hidden-size {m.kv_hidden_size}"),
    ], "GPT-2")  # fmt: skip
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **hf_values(GPT2_NAMES, m),
        "n_positions": positions, "n_inner": m.ff_size, "activation_function": _hf_activation(m),
        "embd_pdrop": m.hidden_dropout, "bos_token_id": start, "eos_token_id": eod,
        "tie_word_embeddings": m.tie_embeddings, "dtype": DTYPES[dtype],
    }  # fmt: skip


def t5_config(m: ModelConfig, pad: int, eod: int, dtype: str) -> dict[str, Any]:
    """Return the config.json for T5ForConditionalGeneration or UMT5ForConditionalGeneration.

    Raises ConfigError for settings that these classes do not support.
    """
    refuse_unsupported([
        (m.num_experts is not None, f"--num-experts {m.num_experts}"),
        (m.position_embedding != "relative", "learned positions (the cpm variant)"),
        (m.normalization != "rmsnorm", f"--normalization {m.normalization}"),
        (m.hidden_bias, "--hidden-bias"),
    ], "T5")  # fmt: skip
    model_type = "umt5" if m.relative_attention_per_layer else "t5"
    return {
        "architectures": [FAMILIES[model_type].class_name], "model_type": model_type, **hf_values(T5_NAMES, m),
        "d_kv": m.head_size, "d_ff": m.ff_size, "num_decoder_layers": m.decoder_layers,
        "feed_forward_proj": _hf_activation(m), "is_encoder_decoder": True,
        "tie_word_embeddings": m.tie_embeddings, "scale_decoder_outputs": m.scale_tied_logits,
        "pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": eod, "dtype": DTYPES[dtype],
    }  # fmt: skip


def _hf_activation(m: ModelConfig) -> str:
    """Return Hugging Face's name of our activation, in the form gated-X if the MLP is gated."""
    return {"gelu-tanh": "gelu_new", "swiglu": "gated-silu"}.get(m.activation, m.activation)

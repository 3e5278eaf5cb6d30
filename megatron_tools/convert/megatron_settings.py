"""Convert the arguments saved in a Megatron-LM checkpoint to this project's settings. Refuses unsupported ones."""

from typing import Any

from megatron.config import Config
from megatron_tools.shapes import whole_shapes

from .megatron_lm import RankFiles

# Megatron-LM's arguments that change what a GPT computes, with the values that this project supports. All other
# arguments affect only training, or do not change the result.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "apply_layernorm_1p": (False,), "squared_relu": (False,),
    "swiglu": (False,), "quick_geglu": (False,), "normalization": ("LayerNorm", "layernorm"), "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "use_rotary_position_embeddings": (False,),
    "position_embedding_type": ("learned_absolute", 2),  # 2: absolute in BigScience's enum, whose members are read so
    "add_position_embedding": (True,),
    "untie_embeddings_and_output_weights": (False,), "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "num_experts": (None, 1, [1]), "window_size": (None,), "softmax_type": ("vanilla",), "mtp_num_layers": (None, 0),
    "add_bias_linear": (True,), "attention_output_gate": (False,), "heterogeneous_layers_config_path": (None,),
    "use_mup": (False,),
}  # fmt: skip
RANK_COUNT_KEYS = ("tensor_model_parallel_size", "model_parallel_size")


def settings_from_megatron(source: RankFiles, given_heads: int | None) -> dict[str, Any]:
    """Return this project's settings by name for a Megatron-LM checkpoint, from its saved arguments and tensor shapes.

    given_heads: number of attention heads, needed if the checkpoint does not record this number. Raises ValueError if
    this project does not support the model.
    """
    saved_args = source.settings
    folder = source.folder
    for name, allowed in SUPPORTED_VALUES.items():
        if name in saved_args and saved_args[name] not in (*allowed, None):
            raise ValueError(f"{folder}: {name} is {saved_args[name]!r}; this project supports only {allowed[0]!r}")
    for name in RANK_COUNT_KEYS:
        if saved_args.get(name) not in (None, source.ranks):
            raise ValueError(
                f"{folder}: {name} is {saved_args[name]}, but the folder has files of {source.ranks} ranks"
            )
    num_heads = _attention_heads(source, given_heads)
    vocab_rows, hidden = source.shape("embedding.word_embeddings.weight")
    positions = source.shape("position_embedding.weight")[0]
    # The rows are those of the queries, keys and values of all heads.
    head_size = source.shape("layers.0.attention.query_key_value.weight")[0] // (3 * num_heads)
    return {
        "family": "gpt2",
        "num_layers": source.layers,
        "hidden_size": hidden,
        "num_attention_heads": num_heads,
        # None: hidden_size / num_attention_heads
        "kv_hidden_size": None if head_size * num_heads == hidden else head_size,
        "ff_hidden_size": source.shape("layers.0.mlp.dense_h_to_4h.weight")[0],
        "max_position_embeddings": positions,
        "seq_length": positions,
        "vocab_size": vocab_rows,
        "activation": _activation(source),
        "layernorm_epsilon": _saved_number(source, 1e-5, "layernorm_epsilon", "norm_epsilon"),
        "hidden_dropout": _saved_number(source, 0.1, "hidden_dropout"),
        "attention_dropout": _saved_number(source, 0.1, "attention_dropout"),
    }


def _attention_heads(source: RankFiles, given_heads: int | None) -> int:
    """Return the number of attention heads: the saved one, else --num-attention-heads."""
    saved_heads = source.settings.get("num_attention_heads")
    if saved_heads is not None and type(saved_heads) is not int:
        raise ValueError(f"{source.folder}: num_attention_heads is {saved_heads!r}, not a number")
    if given_heads and saved_heads and given_heads != saved_heads:
        raise ValueError(
            f"{source.folder} has {saved_heads} attention heads, but --num-attention-heads is {given_heads}"
        )
    num_heads = given_heads or saved_heads
    if num_heads is None:
        raise ValueError(f"{source.folder} does not record the number of attention heads; give --num-attention-heads")
    if num_heads < 1 or num_heads % source.ranks:
        raise ValueError(
            f"{num_heads} heads cannot be split over {source.ranks} model-parallel ranks; change --num-attention-heads"
        )
    return num_heads


def _activation(source: RankFiles) -> str:
    """Return this project's name of Megatron-LM's GELU: `gelu` if it is computed with erf, else `gelu-tanh`."""
    saved_args = source.settings
    if saved_args.get("openai_gelu"):
        return "gelu-tanh"
    onnx_safe = saved_args.get("onnx_safe")
    fuses_bias = saved_args.get("bias_gelu_fusion")
    if onnx_safe and fuses_bias:
        raise ValueError(
            f"{source.folder}: onnx_safe and bias_gelu_fusion are both set, and versions of Megatron-LM differ in "
            f"which one they follow; save the checkpoint again with only the one that applies"
        )
    # By default, Megatron-LM fuses bias and GELU in a kernel with tanh. Both flags lead to its GELU with erf.
    return "gelu" if onnx_safe or fuses_bias is False else "gelu-tanh"


def _saved_number(source: RankFiles, default: float, *names: str) -> float:
    """Return a saved argument, which versions of Megatron-LM save under different names; else return `default`.

    Raises ValueError if the value is not a number, or if values under two names differ.
    """
    saved_values = {}
    for name in names:
        value = source.settings.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise ValueError(f"{source.folder}: {name} is {value!r}, not a number")
        saved_values[name] = value
    if len(set(saved_values.values())) > 1:
        raise ValueError(f"{source.folder}: the saved args contradict each other: {saved_values}")
    # All saved values are equal, so any of them serves.
    return float(saved_values.popitem()[1]) if saved_values else default


def check_complete(source: RankFiles, config: Config) -> None:
    """Raise ValueError unless the files hold all parameters of the model, with the right shapes, and no others."""
    expected_shapes = whole_shapes(config)
    # A name that only one of the two has is an error. Names that both have come twice, which does no harm.
    for name in (*expected_shapes, *source.names()):
        if name not in expected_shapes or name not in source.names():
            problem = "lacks" if name in expected_shapes else "contains"
            raise ValueError(f"{source.folder} {problem} {name}, unlike a GPT with the settings of this checkpoint")
        shape = source.shape(name)
        expected = expected_shapes[name]
        # Only the vocabulary may have more rows, for padding. Slices, because a damaged tensor may have no dimension.
        is_padded = "word_embeddings" in name and shape[:1] > expected[:1]
        rows_fit = is_padded or shape[:1] == expected[:1]
        if not rows_fit or shape[1:] != expected[1:]:
            raise ValueError(
                f"{source.folder}: {name} has shape {list(shape)}, but the other tensors imply {list(expected)}"
            )

"""Convert the arguments saved in a Megatron-LM checkpoint to this project's settings. Refuses unsupported ones."""

from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron_tools.shapes import whole_shapes

from .megatron_lm import RankFiles

# Megatron-LM's arguments that change what a GPT computes, with the values that this project supports. All other
# arguments affect only training, or do not change the result.
MUST: dict[str, tuple[Any, ...]] = {
    "apply_residual_connection_post_layernorm": (False,), "apply_layernorm_1p": (False,), "squared_relu": (False,),
    "swiglu": (False,), "quick_geglu": (False,), "normalization": ("LayerNorm",), "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "use_rotary_position_embeddings": (False,), "position_embedding_type": ("learned_absolute",),
    "add_position_embedding": (True,),
    "untie_embeddings_and_output_weights": (False,), "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "num_experts": (None, 1, [1]), "window_size": (None,), "softmax_type": ("vanilla",), "mtp_num_layers": (None, 0),
    "add_bias_linear": (True,), "attention_output_gate": (False,), "heterogeneous_layers_config_path": (None,),
}  # fmt: skip
RANKS = ("tensor_model_parallel_size", "model_parallel_size")


def settings_of(theirs: RankFiles, heads: int | None) -> dict[str, Any]:
    """Return this project's settings by name for a Megatron-LM checkpoint, from its saved arguments and tensor shapes.

    heads: number of attention heads, needed if the checkpoint does not record this number. Raises ValueError if this
    project does not support the model.
    """
    args = theirs.settings
    where = theirs.folder
    for name, allowed in MUST.items():
        if name in args and args[name] not in (*allowed, None):
            raise ValueError(f"{where}: {name} is {args[name]!r}; this project supports only {allowed[0]!r}")
    for name in RANKS:
        if args.get(name) not in (None, theirs.ranks):
            raise ValueError(f"{where}: {name} is {args[name]}, but the folder has files of {theirs.ranks} ranks")
    count = _heads(theirs, heads)
    rows, hidden = theirs.shape("embedding.word_embeddings.weight")
    positions = theirs.shape("position_embedding.weight")[0]
    width = theirs.shape("layers.0.attention.query_key_value.weight")[0] // (3 * count)
    return {
        "family": "gpt2",
        "num_layers": theirs.layers,
        "hidden_size": hidden,
        "num_attention_heads": count,
        "kv_hidden_size": None if width * count == hidden else width,
        "ff_hidden_size": theirs.shape("layers.0.mlp.dense_h_to_4h.weight")[0],
        "max_position_embeddings": positions,
        "seq_length": positions,
        "vocab_size": rows,
        "activation": _activation(args, str(where)),
        "layernorm_epsilon": _number(theirs, ("layernorm_epsilon", "norm_epsilon"), 1e-5),
        "hidden_dropout": _number(theirs, ("hidden_dropout",), 0.1),
        "attention_dropout": _number(theirs, ("attention_dropout",), 0.1),
    }


def _heads(theirs: RankFiles, given: int | None) -> int:
    """Return the number of attention heads: the saved one, else --num-attention-heads."""
    saved = theirs.settings.get("num_attention_heads")
    if saved is not None and type(saved) is not int:
        raise ValueError(f"{theirs.folder}: num_attention_heads is {saved!r}, not a number")
    if given and saved and given != saved:
        raise ValueError(f"{theirs.folder} has {saved} attention heads, but --num-attention-heads is {given}")
    heads = given or saved
    if heads is None:
        raise ValueError(f"{theirs.folder} does not record the number of attention heads; give --num-attention-heads")
    if heads < 1 or heads % theirs.ranks:
        raise ValueError(
            f"{heads} heads cannot be split over {theirs.ranks} model-parallel ranks; change --num-attention-heads"
        )
    return heads


def _activation(args: Mapping[str, Any], where: str) -> str:
    """Return this project's name of Megatron-LM's GELU: `gelu` if it is computed with erf, else `gelu-tanh`."""
    if args.get("openai_gelu"):
        return "gelu-tanh"
    if args.get("onnx_safe") and args.get("bias_gelu_fusion"):
        raise ValueError(
            f"{where}: onnx_safe and bias_gelu_fusion are both set, and versions of Megatron-LM differ in which one "
            f"they follow; save the checkpoint again with only the one that applies"
        )
    return "gelu" if args.get("onnx_safe") or args.get("bias_gelu_fusion") is False else "gelu-tanh"


def _number(theirs: RankFiles, names: tuple[str, ...], default: float) -> float:
    """Return the saved value under one of several names, or `default` if none is saved."""
    found = {}
    for name in names:
        value = theirs.settings.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise ValueError(f"{theirs.folder}: {name} is {value!r}, not a number")
        found[name] = value
    if len(set(found.values())) > 1:
        raise ValueError(f"{theirs.folder}: the saved args contradict each other: {found}")
    return float(found.popitem()[1]) if found else default


def check_complete(theirs: RankFiles, config: Config) -> None:
    """Raise ValueError unless the files hold all parameters of the model, with the right shapes, and no others."""
    wanted = whole_shapes(config)
    for name in (*wanted, *theirs.names()):
        if name not in wanted or name not in theirs.names():
            fault = "lacks" if name in wanted else "contains"
            raise ValueError(f"{theirs.folder} {fault} {name}, unlike a GPT with the settings of this checkpoint")
        found = tuple(theirs.shape(name))
        shape = wanted[name]
        padded = "word_embeddings" in name and found > shape
        if found[1:] != shape[1:] or (found[:1] != shape[:1] and not padded):
            raise ValueError(
                f"{theirs.folder}: {name} has shape {list(found)}, but the other tensors imply {list(shape)}"
            )

"""Checks that the model sizes in a settings file fit the stored tensors, before the model is allocated."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import CheckpointError

LAYERS = ("num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
# Keys of model sizes, as in checkpoint.json and in config.json of Hugging Face models.
SIZES = (
    "hidden_size", "ff_hidden_size", "num_attention_heads", "num_key_value_heads", "kv_hidden_size", "vocab_size",
    "relative_attention_num_buckets", "n_embd", "n_head", "n_inner", "d_model", "d_kv", "d_ff", "num_heads",
    "intermediate_size",
    "head_dim", "expert_ff_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "num_shared_experts")  # keys of numbers of experts
# Up to FEW_LAYERS layers or experts, and sizes up to SMALL_SIZE are accepted without a comparison with the stored
# tensors: if they are wrong, loading the tensors later raises an error that names the tensor. Values above MOST are
# always refused.
FEW_LAYERS, SMALL_SIZE, MOST = 512, 1 << 20, 1 << 40


def refuse_absurd_sizes(values: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: Path) -> None:
    """Raise CheckpointError if a setting of the model is too large for the stored tensors.

    A number of layers is too large if it exceeds both the number of tensors and 512. A size is too large if it exceeds
    both the largest tensor dimension and 2**20, a number of experts if it exceeds this dimension and 512. Any number
    above 2**40 is too large.
    values: settings of the model. shapes: shapes of the stored tensors. where: file of the settings, for the message.
    """
    stored = list(shapes)
    largest = max((max(shape, default=0) for shape in stored), default=0)
    for key, value in values.items():
        if type(value) is not int:
            continue
        is_size = key in SIZES and value > max(largest, SMALL_SIZE)
        is_count = key in EXPERTS and value > max(largest, FEW_LAYERS)
        given = f"{where}: {key} is {_shown(value)}"
        if key in LAYERS and value > max(len(stored), FEW_LAYERS):
            raise CheckpointError(f"{given}, but only {len(stored)} tensors are stored")
        if is_size or is_count:
            raise CheckpointError(f"{given}, but the largest dimension of the stored tensors is {largest}")
        if value > MOST:
            raise CheckpointError(f"{given}, which is larger than in any model")


def _shown(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"

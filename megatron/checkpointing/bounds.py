"""Checks that the model sizes in a settings file fit the stored tensors, before the model is allocated."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from .files import CheckpointError

LAYER_KEYS = ("num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
# Keys of model sizes, as in checkpoint.json and in config.json of Hugging Face models.
SIZE_KEYS = (
    "hidden_size", "ff_hidden_size", "num_attention_heads", "num_key_value_heads", "kv_hidden_size", "vocab_size",
    "relative_attention_num_buckets", "n_embd", "n_head", "n_inner", "d_model", "d_kv", "d_ff", "num_heads",
    "intermediate_size",
    "head_dim", "expert_ff_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "num_local_experts", "num_shared_experts")  # keys of numbers of experts
# Up to ACCEPTED_COUNT layers or experts, and sizes up to ACCEPTED_SIZE are accepted without a comparison with the
# stored tensors: if they are wrong, loading the tensors later raises an error that names the tensor. Values above
# MAX_VALUE are always refused.
ACCEPTED_COUNT = 512
ACCEPTED_SIZE = 1 << 20
MAX_VALUE = 1 << 40


def refuse_absurd_sizes(values: Mapping[str, Any], shapes: Iterable[Sequence[int]], settings_file: Path) -> None:
    """Raise CheckpointError if a setting of the model is too large for the stored tensors.

    A number of layers is too large if it exceeds both the number of tensors and 512. A size is too large if it exceeds
    both the largest tensor dimension and 2**20, a number of experts if it exceeds this dimension and 512. Any number
    above 2**40 is too large.
    values: settings of the model. shapes: shapes of the stored tensors. settings_file: their file, for the message.
    """
    stored_shapes = list(shapes)
    largest_dim = max(chain(*stored_shapes), default=0)
    for key, value in values.items():
        if type(value) is not int:  # texts, fractions and flags are no sizes
            continue
        is_large_size = key in SIZE_KEYS and value > max(largest_dim, ACCEPTED_SIZE)
        is_large_count = key in EXPERT_KEYS and value > max(largest_dim, ACCEPTED_COUNT)
        # A damaged file may hold a number with hundreds of digits, which would flood the message.
        shown = str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"
        setting = f"{settings_file}: {key} is {shown}"
        if key in LAYER_KEYS and value > max(len(stored_shapes), ACCEPTED_COUNT):
            raise CheckpointError(f"{setting}, but only {len(stored_shapes)} tensors are stored")
        if is_large_size or is_large_count:
            raise CheckpointError(f"{setting}, but the largest dimension of the stored tensors is {largest_dim}")
        if value > MAX_VALUE:
            raise CheckpointError(f"{setting}, which is larger than in any model")

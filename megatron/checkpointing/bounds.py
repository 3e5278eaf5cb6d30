"""Checks that the sizes in a settings file fit the stored tensors, before the model is allocated."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import CheckpointError

LAYERS = ("num_layers", "num_decoder_layers", "n_layer", "num_hidden_layers")
# Names of sizes in the settings of checkpoint.json, and in config.json of Hugging Face models.
SIZES = (
    "hidden_size", "ff_hidden_size", "num_attention_heads", "num_key_value_heads", "kv_hidden_size", "vocab_size",
    "relative_attention_num_buckets", "n_embd", "n_head", "n_inner", "d_model", "d_kv", "d_ff", "num_heads",
    "intermediate_size",
    "head_dim",
)  # fmt: skip
# Smaller values are accepted here, even if no tensor has them: the model is then built without weights, and an error
# names the tensor that does not fit. Values above MOST are always refused.
FEW_LAYERS, SMALL_SIZE, MOST = 512, 1 << 20, 1 << 40


def refuse_absurd_sizes(values: Mapping[str, Any], shapes: Iterable[Sequence[int]], where: Path) -> None:
    """Raise CheckpointError for settings that are too large for the tensors.

    These are more layers than tensors (and than 512), a size above every tensor dimension (and above 2**20), and any
    number above 2**40.
    values: settings of the model. shapes: shapes of the stored tensors.
    """
    dims = [list(shape) for shape in shapes]
    largest = max((size for shape in dims for size in shape), default=0)
    for key, value in values.items():
        if type(value) is not int:
            continue
        if key in LAYERS and value > max(len(dims), FEW_LAYERS):
            raise CheckpointError(f"{where}: {key} is {_shown(value)}, but there are only {len(dims)} tensors")
        if key in SIZES and value > max(largest, SMALL_SIZE):
            raise CheckpointError(
                f"{where}: {key} is {_shown(value)}, but the largest dimension of a tensor is {largest}"
            )
        if value > MOST:
            raise CheckpointError(f"{where}: {key} is {_shown(value)}, more than any model has")


def _shown(value: int) -> str:
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"

"""Writing of a checkpoint in one process, from weights that a tool has imported or averaged."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.atomic import remove
from megatron.config import Config

from .checksums import preferred_checksum
from .files import publish, temporary_folder
from .save import index_text
from .state import TrainState
from .stream import LazyTensor, write_tensor_file


def write_checkpoint(
    final: Path,
    entries: Sequence[LazyTensor],
    config: Config,
    fingerprint: str,
    average_of: list[dict[str, Any]] | None = None,
) -> None:
    """Write imported or averaged weights as a checkpoint of iteration 0, in one process and one tensor at a time."""
    temporary = temporary_folder(final)
    remove(temporary)
    temporary.mkdir(parents=True)
    file_name = "weights.safetensors"
    checksum = preferred_checksum()
    try:
        sums = {file_name: write_tensor_file(temporary / file_name, entries, checksum)}
        tensors = {}
        for entry in entries:
            piece = {"file": file_name, "begin": 0, "end": entry.shape[0]}
            tensors[entry.name] = {"shape": list(entry.shape), "dim": 0, "pieces": [piece]}
        text = index_text(TrainState(), config, fingerprint, tensors, average_of=average_of)
        publish(final, temporary, text, checksum, sums)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

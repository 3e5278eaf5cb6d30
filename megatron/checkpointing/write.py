"""Writing of a checkpoint in one process, from weights that a tool has imported or averaged."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.atomic import remove
from megatron.config import Config

from .checksums import preferred
from .files import publish, temporary_of
from .index import index_text
from .state import TrainState
from .stream import Entry, write_entries


def write_checkpoint(
    final: Path,
    entries: Sequence[Entry],
    config: Config,
    fingerprint: str,
    average_of: list[dict[str, Any]] | None = None,
) -> None:
    """Write imported or averaged weights as a checkpoint of iteration 0, in one process and one tensor at a time."""
    temporary = temporary_of(final)
    remove(temporary)
    temporary.mkdir(parents=True)
    name = "weights.safetensors"
    checksum = preferred()
    try:
        sums = {name: write_entries(temporary / name, entries, checksum)}
        tensors = {
            e.name: {"shape": list(e.shape), "dim": 0, "pieces": [{"file": name, "begin": 0, "end": e.shape[0]}]}
            for e in entries
        }
        text = index_text(TrainState(), config, fingerprint, tensors, average_of=average_of)
        publish(final, temporary, text, checksum, sums)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

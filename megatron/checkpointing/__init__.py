"""Checkpoints without pickle, independent of the parallel layout: saved by any grid of ranks, loaded by any other grid.

    checkpoints/latest                      name of the newest complete checkpoint, and the SHA-256 of its BLAKE3SUMS
    checkpoints/iter_0000200/
        BLAKE3SUMS                          a checksum per file; `b3sum -c BLAKE3SUMS` verifies them
        checkpoint.json                     training state, settings, and the location of each tensor
        pipe00-model00-data00.safetensors   written by one rank: whole tensors or ranges of rows

Every tensor is stored under its global name. Replicated and tied weights are stored once. Vocabulary padding is not
stored.
A checkpoint is written into a folder with a temporary name, which is renamed when all of it is on disk;
`latest` is updated last. So `latest` always names a complete checkpoint, even after a crash.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .files import CheckpointError
    from .load import load_checkpoint
    from .lookup import find_checkpoint, latest_checkpoint
    from .reader import CheckpointReader, each_weight, load_weights, plain_config
    from .resume import find_start, start_or_resume
    from .retention import prune
    from .retry import RetryingSaver
    from .save import Saver, save_checkpoint
    from .state import TrainState
    from .wanted import Wanted

# Name -> module. The names are imported lazily, as most programs need few of them.
_HOMES = {
    "CheckpointError": "files", "CheckpointReader": "reader", "RetryingSaver": "retry", "Saver": "save",
    "TrainState": "state", "Wanted": "wanted", "each_weight": "reader", "find_checkpoint": "lookup",
    "find_start": "resume", "latest_checkpoint": "lookup", "load_checkpoint": "load", "load_weights": "reader",
    "plain_config": "reader", "prune": "retention", "save_checkpoint": "save", "start_or_resume": "resume",
}  # fmt: skip

__all__ = [
    "CheckpointError", "CheckpointReader", "RetryingSaver", "Saver", "TrainState", "Wanted", "each_weight",
    "find_checkpoint", "find_start", "latest_checkpoint", "load_checkpoint", "load_weights", "plain_config", "prune",
    "save_checkpoint", "start_or_resume",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)

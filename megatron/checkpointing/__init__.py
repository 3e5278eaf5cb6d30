"""Checkpoints that know no layout and no pickle: saved from any grid of ranks, loaded into any other.

    checkpoints/latest                      name of the newest whole checkpoint, and the checksum of its SHA256SUMS
    checkpoints/iter_0000200/
        SHA256SUMS                          a checksum per file; `sha256sum -c SHA256SUMS` checks them, too
        checkpoint.json                     training state, settings, where each tensor lies
        pipe00-model00-data00.safetensors   what that rank wrote: tensors whole or in stretches of rows

Every tensor stands under its global name. Vocabulary padding, copies and tied weights are
stored once or not at all. A checkpoint is written into a folder with a temporary name, which is
renamed when all of it is on disk; `latest` moves last. So whatever happens, `latest` names a
whole checkpoint.
"""

from .files import CheckpointError, find_checkpoint, latest_checkpoint
from .load import Wanted, load_checkpoint
from .patience import PatientSaver
from .reader import CheckpointReader, each_weight, load_weights, plain_config
from .resume import find_start, start_or_resume
from .retention import prune
from .save import Saver, save_checkpoint
from .state import TrainState

__all__ = [
    "CheckpointError", "CheckpointReader", "PatientSaver", "Saver", "TrainState", "Wanted", "each_weight", "find_checkpoint", "find_start",
    "latest_checkpoint", "load_checkpoint", "load_weights", "plain_config", "prune", "save_checkpoint", "start_or_resume",
]  # fmt: skip

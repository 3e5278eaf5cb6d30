"""Persistent buffers in checkpoints: which rank writes each one, and warnings for those that cannot be stored."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.model.layers import global_buffers
from megatron.ranks.buffers import BufferCopy

from .checksums import Checksum
from .files import BUFFER
from .stream import DTYPE_CODES, LazyTensor, as_stored, write_tensor_file


class SavedBuffers:
    """The buffers that this rank saves, as CPU copies by checkpoint key, and warnings about buffers.

    copies: key in the checkpoint -> CPU copy of the buffer. warnings: lines of text for rank 0 to print.
    """

    def __init__(self, model: nn.Module, surveys: Sequence[Mapping[str, BufferCopy]]) -> None:
        """Copy to the CPU the buffers that this rank saves, and collect the warnings.

        surveys: the result of `megatron.ranks.buffers.fingerprint_buffers` on each rank.
        """
        mesh = mpu.get_mesh()
        coordinates = (mesh.pipe.rank, mesh.data.rank, mesh.model.rank)
        local_buffers = dict(global_buffers(model))
        copies_of: dict[str, list[BufferCopy]] = {}  # name of a buffer -> its copies on all ranks
        for survey in surveys:
            for name, copy in survey.items():
                copies_of.setdefault(name, []).append(copy)
        self.copies: dict[str, Tensor] = {}
        self.warnings: list[str] = []
        for name, copies in copies_of.items():
            # Of the saving stage, the first data-parallel and model-parallel rank writes the buffer.
            if name in local_buffers and coordinates == (_saving_stage(name, copies), 0, 0):
                stored = as_stored(local_buffers[name].detach())
                self.copies[f"{BUFFER}.{name}"] = stored.to("cpu", copy=True)
            self.warnings += _conflict_warnings(name, copies)
        for name, buffer in local_buffers.items():
            # An empty buffer has no value that could be lost.
            if buffer.numel() and not is_savable(buffer):
                self.warnings.append(
                    f"warning: the buffer {name} is {buffer.dtype} and {buffer.layout}, which checkpoints cannot "
                    f"store: a resumed run starts with the initial value of {name}"
                )
        for name, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:  # the class of the module overrides it
                self.warnings.append(
                    f"warning: the module {name or type(module).__name__} has get_extra_state(), but checkpoints do "
                    f"not store extra state: keep the state in buffers"
                )

    @property
    def expected(self) -> dict[str, list[int]]:
        """Shape of each buffer that this rank saves, keyed by the buffer's key in the checkpoint."""
        return {key: list(value.shape) for key, value in self.copies.items()}

    def write(self, path: Path, checksum: Checksum) -> dict[str, Any] | None:
        """Write this rank's buffers to `path`. Raises OSError.

        Returns the file's report (name, checksum and tensors); None if this rank has no buffers to write.
        """
        if not self.copies:
            return None
        entries = []
        placements = {}
        for key, value in self.copies.items():
            shape = list(value.shape)
            entries.append(LazyTensor(key, tuple(shape), value.dtype, value.detach))
            # A buffer is never split, so its only piece has all rows.
            placements[key] = {"dim": 0, "begin": 0, "end": shape[0], "shape": shape}
        file_sum = write_tensor_file(path, entries, checksum)
        # Buffers get no gradients, so "with_gradient" is empty.
        return {"file": path.name, "sum": file_sum, "tensors": placements, "with_gradient": set()}


def is_savable(buffer: Tensor) -> bool:
    """Return whether checkpoint files can store a buffer of this dtype and layout, which may be sparse."""
    # Complex numbers are stored as pairs of real ones.
    return buffer.layout is torch.strided and buffer.dtype.to_real() in DTYPE_CODES


def _saving_stage(name: str, copies: Sequence[BufferCopy]) -> int:
    """Return the pipeline stage that saves a buffer.

    Buffers of the loss function are saved by the last stage. Any other buffer is saved by the first stage on which its
    value has changed. If the value has changed on no stage, the first stage that holds the buffer saves it.
    """
    stages = [each.pipe for each in copies]
    if name.startswith("loss_fn."):
        return max(stages)
    changed = [each.pipe for each in copies if each.changed]
    return min(changed or stages)


def _conflict_warnings(name: str, copies: Sequence[BufferCopy]) -> Iterator[str]:
    """Yield a warning if the copies of a buffer differ between ranks, as a checkpoint stores only one copy."""
    saving_stage = _saving_stage(name, copies)
    saved = [each for each in copies if each.pipe == saving_stage]
    # Each set has the fingerprints along one axis of the grid of ranks; the other coordinates are fixed.
    replicas = {each.fingerprint for each in saved if each.model == 0}
    shards = {each.fingerprint for each in saved if each.data == 0}
    # Stages that have not changed the buffer still hold its initial value, which is no conflict.
    stages = {each.fingerprint for each in copies if each.changed and each.data == 0 and each.model == 0}
    if name.startswith("loss_fn."):  # the last stage saves it, whatever other stages do with their copies
        stages.clear()
    for fingerprints, axis, advice in (
        (replicas, "data-parallel replicas", "reduce it over mpu.get_data_parallel_group()"),
        (
            shards,
            "model-parallel ranks",
            "make it a parameter without gradient, and describe its split with mpu.declare()",
        ),
        (stages, "pipeline stages", "keep it in the layer that changes it"),
    ):
        if len(fingerprints) > 1:
            yield (
                f"warning: the buffer {name} differs between {axis}, but a checkpoint holds only the first copy "
                f"(stage {saving_stage}); {advice}, or set persistent=False if it need not be saved"
            )

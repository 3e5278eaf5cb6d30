"""Fingerprints of a model's buffers, to find ranks whose copies of a buffer differ or have changed during the run."""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import mpu
from ..model.layers import global_buffers
from .replicas import fingerprint

_initial_fingerprints: "WeakKeyDictionary[nn.Module, dict[str, int]]" = WeakKeyDictionary()


class BufferCopy(NamedTuple):
    """One rank's copy of a buffer: the rank's position in the grid, and the fingerprint of the copy.

    changed: whether the copy has changed since the run began or was resumed.
    """

    pipe: int
    data: int
    model: int
    fingerprint: int
    changed: bool


def record_buffers(model: nn.Module) -> None:
    """Record fingerprints of the buffers of `model`, so that a later save can tell which stages changed a buffer."""
    _initial_fingerprints[model] = _fingerprints(model, lambda _: True)


def fingerprint_buffers(model: nn.Module, savable: Callable[[Tensor], bool]) -> dict[str, BufferCopy]:
    """Return a `BufferCopy` for each savable buffer of this rank, by name. All ranks exchange them before a save."""
    mesh = mpu.get_mesh()
    initial = _initial_fingerprints.get(model, {})
    coord = mesh.pipe.rank, mesh.data.rank, mesh.model.rank
    copies = {}
    for name, current in _fingerprints(model, savable).items():
        recorded = initial.get(name, current)  # a buffer that was not recorded counts as unchanged
        copies[name] = BufferCopy(*coord, current, recorded != current)
    return copies


def _fingerprints(model: nn.Module, included: Callable[[Tensor], bool]) -> dict[str, int]:
    return {
        name: int(fingerprint(_as_real(buffer.detach())).item())
        for name, buffer in global_buffers(model)
        if buffer.numel() and buffer.layout is torch.strided and not buffer.is_quantized and included(buffer)
    }


def _as_real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer.resolve_conj()) if buffer.is_complex() else buffer

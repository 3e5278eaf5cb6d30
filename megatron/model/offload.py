"""What a layer keeps for its backward pass waits in the host's memory, not in the accelerator's (Rhu et al. 2016)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._torch import base_of

SMALLEST = 1 << 20  # bytes; less is not worth a copy


def offloaded() -> saved_tensors_hooks:
    """Within, autograd keeps what it saves in pinned memory of the host; weights, and what is there already, stay."""
    return saved_tensors_hooks(_away, _back)


def _stays(tensor: Tensor) -> bool:
    return isinstance(base_of(tensor), nn.Parameter) or tensor.nbytes < SMALLEST or not _is_elsewhere(tensor.device)


def _is_elsewhere(device: torch.device) -> bool:
    return device.type != "cpu"


def _away(tensor: Tensor) -> Any:
    if _stays(tensor):
        return tensor
    # Queued after what computes the tensor, so nothing waits, and before whatever uses its memory next.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=_is_elsewhere(tensor.device))
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _back(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)  # type: ignore[no-any-return]

"""torch.autocast, and second derivatives, in functions with backward passes of their own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def in_autocast_dtype(*tensors: Tensor | None) -> Any:
    """Return the tensors in autocast's dtype, unchanged outside of autocast; None stays None.

    A custom backward pass runs outside of autocast, so all its factors must have the dtype of the forward pass.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    device_type = present[0].device.type  # such as cuda; all tensors are on one device
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def present_autocast(device: torch.device, *, off: bool = False) -> AbstractContextManager[object]:
    """Return a context with the autocast that is now set for `device`; with `off`, one without autocast."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):  # such as meta
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind) and not off)


def refuse_second_derivatives() -> None:
    """Raise RuntimeError in a backward pass with create_graph=True, for functions with first derivatives only."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: losses and collectives of megatron.mpu have no second derivatives; compute a loss with "
            "torch.nn.functional.cross_entropy (--reference-ops cross-entropy), on one tensor-parallel rank"
        )

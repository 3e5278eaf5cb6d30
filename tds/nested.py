"""What layers and data loaders pass around: a tensor, or a tuple of them."""

from typing import Any

import torch
from torch import Tensor


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def unwrap(x: tuple[Tensor, ...]) -> Any:
    """Layers get a tensor where the tuple has one, as in DeepSpeed."""
    return x[0] if len(x) == 1 else x


def to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, Tensor):
        return x.detach().to(device, non_blocking=True)
    if isinstance(x, (tuple, list)):
        return tuple(to_device(each, device) for each in x)
    return x

"""What layers and data loaders pass around: a tensor, or a tuple of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_tuple(x: Any) -> tuple[Any, ...]:
    """A tuple as it is, anything else as a tuple of one."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def unwrap(x: tuple[Tensor, ...]) -> Any:
    """Layers get a tensor where the tuple has one, as in DeepSpeed."""
    return x[0] if len(x) == 1 else x


def each_tensor(x: Any, f: Callable[[Tensor], Any]) -> Any:
    """`x` with every tensor in it replaced by what `f` makes of it."""
    if isinstance(x, (tuple, list)):
        return tuple(each_tensor(each, f) for each in x)
    if isinstance(x, dict):
        return {key: each_tensor(value, f) for key, value in x.items()}
    return f(x) if isinstance(x, Tensor) else x


def in_full(x: Any) -> Any:
    """`x`, or what it stands for: a last layer may put work off until its loss asks for it, in an object with a method `in_full`."""
    make = getattr(x, "in_full", None)
    return make() if make else x


def to_device(x: Any, device: torch.device) -> Any:
    """Every tensor in there on `device`."""
    return each_tensor(x, lambda t: t.detach().to(device, non_blocking=True))

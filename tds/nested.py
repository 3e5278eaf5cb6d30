"""Helpers for what layers and data loaders pass around: a tensor, or a nested structure of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_tuple(x: Any) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple, anything else as a tuple of one."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def unwrap(x: tuple[Tensor, ...]) -> Any:
    """Return the only element of a tuple of one, else the tuple; DeepSpeed passes inputs to layers like this."""
    return x[0] if len(x) == 1 else x


def each_tensor(x: Any, f: Callable[[Tensor], Any]) -> Any:
    """Return `x` with `f` applied to every tensor in it."""
    if isinstance(x, (tuple, list)):
        return tuple(each_tensor(each, f) for each in x)
    if isinstance(x, dict):
        return {key: each_tensor(value, f) for key, value in x.items()}
    return f(x) if isinstance(x, Tensor) else x


def in_full(x: Any) -> Any:
    """Return `x`, or the result of its method `in_full`.

    A last layer may return an object with this method to defer work until its loss needs it.
    """
    make = getattr(x, "in_full", None)
    return make() if make else x


def to_device(x: Any, device: torch.device) -> Any:
    """Return `x` with every tensor detached and on `device`."""
    return each_tensor(x, lambda t: t.detach().to(device, non_blocking=True))

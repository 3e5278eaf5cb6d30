"""Helpers for what layers and data loaders pass around: a tensor, or a nested structure of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple, anything else as a tuple of one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def map_tensors(value: Any, function: Callable[[Tensor], Any], on_others: Callable[[Any], Any] | None = None) -> Any:
    """Return `value` with `function` applied to every tensor in it, and `on_others`, if given, to every other object.

    Tuples, lists and dicts are structure; the items of any other object, such as a dataclass, are not looked at. A
    list becomes a tuple.
    """
    if isinstance(value, (tuple, list)):
        items = tuple(map_tensors(each, function, on_others) for each in value)
        if hasattr(value, "_fields"):  # a NamedTuple stays one
            return type(value)(*items)
        return items
    if isinstance(value, dict):
        return {key: map_tensors(each, function, on_others) for key, each in value.items()}
    if isinstance(value, Tensor):
        return function(value)
    return on_others(value) if on_others else value


def in_full(value: Any) -> Any:
    """Return the result of the method `in_full`, by which a last layer defers work, of `value` or a tuple's items."""
    if type(value) is tuple:  # a NamedTuple of the user's stays one
        return tuple(map(in_full, value))
    complete = getattr(value, "in_full", None)
    return complete() if complete else value


def to_device(value: Any, device: torch.device) -> Any:
    """Return `value` with every tensor detached and on `device`."""
    return map_tensors(value, lambda t: t.detach().to(device, non_blocking=True))

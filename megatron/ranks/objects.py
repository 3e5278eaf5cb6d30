"""Exchange of Python objects between ranks. With a single rank, torch.distributed is not needed."""

from typing import Any, TypeVar

import torch.distributed as dist

from ..mpu import Axis
from .rank_0 import num_ranks

T = TypeVar("T")


def gather_objects(value: T, axis: Axis | None = None) -> list[T]:
    """Return the `value` of each rank of `axis`, or of all ranks if `axis` is None. These ranks must all call this."""
    values: list[Any] = [value] * (axis.size if axis else num_ranks())
    if len(values) > 1:
        dist.all_gather_object(values, value, axis.group if axis else None)
    return values


def broadcast_from_rank_0(value: T) -> T:
    """Return rank 0's `value` on all ranks. All ranks must call this."""
    values = [value]
    if num_ranks() > 1:
        dist.broadcast_object_list(values)
    return values[0]

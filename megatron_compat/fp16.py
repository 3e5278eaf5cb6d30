"""Casts of nested tuples of tensors between fp16 and fp32, for entry scripts of CPM-Pretrain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(element, convert) for element in value)
    return convert(value) if isinstance(value, Tensor) else value


def fp32_to_fp16(value: Any) -> Any:
    """Return `value`, a tensor or nested tuples and lists of tensors, with fp32 tensors cast to fp16."""
    return _map_tensors(value, lambda tensor: tensor.half() if tensor.dtype == torch.float32 else tensor)


def fp16_to_fp32(value: Any) -> Any:
    """Return `value`, a tensor or nested tuples and lists of tensors, with fp16 and bf16 tensors cast to fp32."""
    half = (torch.float16, torch.bfloat16)
    return _map_tensors(value, lambda tensor: tensor.float() if tensor.dtype in half else tensor)

"""Casts of nested tuples of tensors between fp16 and fp32, for entry scripts of CPM-Pretrain."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _cast(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(each, change) for each in value)
    return change(value) if isinstance(value, Tensor) else value


def fp32_to_fp16(value: Any) -> Any:
    """Return `value`, a tensor or nested tuples and lists of tensors, with fp32 tensors cast to fp16."""
    return _cast(value, lambda x: x.half() if x.dtype == torch.float32 else x)


def fp16_to_fp32(value: Any) -> Any:
    """Return `value`, a tensor or nested tuples and lists of tensors, with fp16 and bf16 tensors cast to fp32."""
    return _cast(value, lambda x: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)

"""The second kernel of linear layers in bf16 and fp16 on a CPU; features/cpu_matmul.py measures where it is faster."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import multiplies_in_parts, reshape_to_base

# With AMX, oneDNN multiplies about 1,000 rows up to 1.7 times as fast in parts of at most this many rows.
MAX_AMX_ROWS = 512


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] -> [..., o], all in bf16 or fp16.

    This is torch's kernel for 16 bits on parts of the rows, or the kernel for fp32, whose result is rounded.
    """
    if multiplies_in_parts(x.dtype):
        parts = [F.linear(part, weight, bias) for part in torch.split(x.flatten(0, -2), MAX_AMX_ROWS)]
        return reshape_to_base(torch.cat(parts), (*x.shape[:-1], len(weight)))
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)

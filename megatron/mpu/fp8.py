"""Matmuls in fp8 with one scale per row (`--precision fp8`), for the linear layers of transformer layers.

Both factors of a matmul are rounded to float8_e4m3fn along the dimension that the matmul sums over: each row of the
first factor, and each output row of the second, has its own scale. The products are summed in fp32, and the result is
bf16. The output and the input's gradient are computed in this way. The weight's gradient is a bf16 matmul of unrounded
factors, so its fp32 accumulation does not change (the recipe that torchao calls rowwise_with_gw_hp).

Scales are powers of two. So the scale of a row does not change how its numbers are rounded, unless they are below 2^-15
of the row's largest number, where e4m3 has fewer bits. Model-parallel ranks that hold shards of the rows therefore need
no common scale: an all-reduce of the largest numbers would change a sum less than rounding the sum to bf16 does.

Shapes: ... any leading dimensions; n tokens, i features in, o features out.
"""

import torch
from torch import Tensor

from .._torch import reshaped, scaled_matmul

ROUNDED = torch.float8_e4m3fn
LARGEST = torch.finfo(ROUNDED).max  # 448
MULTIPLE = 16  # CUDA's kernels need sizes i and o that are multiples of 16


def row_scales(x: Tensor) -> Tensor:
    """Return the scale of each row of x [n, i], fp32 [n, 1].

    A scale is the smallest power of two, or twice that, with which the row fits into e4m3. It is NaN if the row has a
    NaN or Inf, so that the result of the matmul is NaN, too: rounding alone would turn Inf into 448 on some devices.
    """
    largest = x.abs().amax(1, keepdim=True).float()
    _, exponent = torch.frexp(largest / LARGEST)
    return torch.ldexp(torch.ones_like(largest), exponent) + largest * 0


def fp8_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] in fp8 -> bf16 [..., o]; x and weight have any strides."""
    flat = x.reshape(-1, x.shape[-1])
    of_x = row_scales(flat)
    of_weight = row_scales(weight)
    y = scaled_matmul(_rounded(flat, of_x), _rounded(weight, of_weight), of_x, of_weight, bias)
    return reshaped(y, (*x.shape[:-1], y.shape[-1]))


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    """Divide each row of x [n, i] by its scale [n, 1] and round it to e4m3, in row-major order."""
    return (x / scales).to(ROUNDED).contiguous()

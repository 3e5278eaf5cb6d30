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

from .._torch import reshape_to_base, scaled_matmul

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max  # 448
SIZE_MULTIPLE = 16  # CUDA's kernels need sizes i and o that are multiples of 16


def row_scales(x: Tensor) -> Tensor:
    """Return the scale of each row of x [n, i], fp32 [n, 1].

    A scale is the smallest power of two, or twice that, with which the row fits into e4m3. It is NaN if the row has a
    NaN or Inf, so that the result of the matmul is NaN, too: rounding alone would turn Inf into 448 on some devices.
    """
    row_max = x.abs().amax(1, keepdim=True).float()
    # frexp gives the exponent e with 2^(e - 1) <= row_max / FP8_MAX < 2^e, so 2^e is a large enough scale.
    _, exponent = torch.frexp(row_max / FP8_MAX)
    ones = torch.ones_like(row_max)
    scales = torch.ldexp(ones, exponent)
    return scales + row_max * 0  # adds NaN for NaN and Inf, else 0


def fp8_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] in fp8 -> bf16 [..., o]; x and weight have any strides."""
    flat_x = x.reshape(-1, x.shape[-1])
    x_scales = row_scales(flat_x)
    weight_scales = row_scales(weight)
    output = scaled_matmul(_quantize(flat_x, x_scales), _quantize(weight, weight_scales), x_scales, weight_scales, bias)
    return reshape_to_base(output, (*x.shape[:-1], output.shape[-1]))


def _quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Divide each row of x [n, i] by its scale [n, 1] and round it to e4m3, in row-major order."""
    return (x / scales).to(FP8_DTYPE).contiguous()

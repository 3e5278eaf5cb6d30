"""Embedding look-ups and LayerNorm whose weight gradients are summed over all tokens in fp32.

torch's CPU kernels add these gradients in the dtype of the input. In bf16 a sum of ones stops at 256, so a gradient
over thousands of tokens is wrong by up to 90 % (torch 2.11 to 2.15). torch's CUDA kernels accumulate in fp32.

Shapes: ... any leading dimensions, v rows of a table, h hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import needs_grad


def sums_in_input_dtype(x: Tensor) -> bool:
    """Return whether torch's kernels would add gradients over the tokens of x [...] in a dtype narrower than fp32.

    Compiled code accumulates in fp32.
    """
    is_narrow = x.is_floating_point() and torch.finfo(x.dtype).bits < 32
    return is_narrow and x.device.type == "cpu" and not torch.compiler.is_compiling()


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Look up rows of table [v, h] by integer ids [...] -> [..., h]; the table's gradient is summed in fp32."""
    if not sums_in_input_dtype(table):
        return F.embedding(ids, table)
    return _Embedding.apply(ids, table)  # type: ignore[no-untyped-call,no-any-return]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:  # type: ignore[override]
        if not needs_grad(ctx, 1):
            return None, None
        (ids,) = ctx.saved_tensors
        # Only rows that occur get a sum in fp32. A sum for each row of a large vocabulary would take more memory.
        used_rows, sum_index = ids.unique(return_inverse=True)
        width = grad.shape[-1]
        sums = grad.new_zeros(len(used_rows), width, dtype=torch.float32)
        sums.index_add_(0, sum_index.flatten(), grad.reshape(-1, width).float())
        table_grad = grad.new_zeros(ctx.rows, width)
        table_grad[used_rows] = sums.to(grad.dtype)
        return None, table_grad


def layer_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise x [..., *shape] over its last dimensions (Ba et al. 2016); gradients of weights are summed in fp32.

    weight, bias: [*shape], or None.
    """
    if weight is None or not sums_in_input_dtype(x):
        return F.layer_norm(x, shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call,no-any-return]


class _LayerNorm(torch.autograd.Function):
    """LayerNorm computed in fp32, which saves its input in the input's dtype, and two numbers per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide_bias = None if bias is None else bias.float()
        output, mean, inverse_std = torch.native_layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse_std)
        return output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mean, inverse_std = ctx.saved_tensors
        wide_bias = None if bias is None else bias.float()
        needed = [needs_grad(ctx, i) for i in range(3)]
        input_grad, weight_grad, bias_grad = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x.float(), weight.shape, mean, inverse_std, weight.float(), wide_bias, needed
        )
        return _cast_like(input_grad, x), _cast_like(weight_grad, weight), _cast_like(bias_grad, bias), None


def _cast_like(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)

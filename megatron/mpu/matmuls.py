"""Matmuls of linear layers, and which gradients a backward pass needs.

Shapes: ... any leading dimensions; i features in, o features out, n tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import onednn_linear, will_run


class Products(NamedTuple):
    """Which products of a linear layer run in the second of the two kernels between which `matmul` chooses."""

    output: bool = False
    input_grad: bool = False
    weight_grad: bool = False


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, second: bool) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] -> [..., o]; both x and weight may have any strides.

    second: use a kernel that is faster than torch's own on some CPUs. For fp32 this is oneDNN's. For 16 bits it is the
    kernel for fp32, with the result rounded: CPUs without instructions for bf16 emulate it slowly.
    """
    if not second:
        return F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        return onednn_linear(x, weight, bias)
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def transposed_matmul(x: Tensor, y: Tensor, second: bool) -> Tensor:
    """Multiply the transpose of x [n, o] by y [n, i] -> [o, i].

    oneDNN copies its first factor unless that factor is row-major, so it would copy the transposed x. For a large x,
    such as the gradient of logits, copying y and the result is cheaper: y is then the first factor, and the result
    is transposed.
    """
    n, o = x.shape
    i = y.shape[1]
    if second and x.dtype == torch.float32 and n * o > n * i + o * i:
        return matmul(y.t(), x.t(), None, second).t().contiguous()
    return matmul(x.t(), y.t(), None, second)


def add_matmul(total: Tensor | None, x: Tensor, weight: Tensor, second: bool, factor: float = 1.0) -> Tensor:
    """Add factor * (x [..., i] times the transpose of weight [o, i]) to total [..., o] in place.

    If total is None, the result is a new tensor, in at least fp32. If total has the dtype of x, torch's matmul adds
    to it in a single pass over memory.
    """
    if total is not None and total.dtype == x.dtype and not second:
        return total.addmm_(x, weight.t(), alpha=factor)
    found = matmul(x, weight, None, second)
    if total is not None:
        return total.add_(found, alpha=factor)
    found = found.to(torch.promote_types(x.dtype, torch.float32))
    if factor != 1.0:
        found.mul_(factor)
    return found


def gradient_of_weight(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the transpose of grad [n, o] times x [n, i], for n tokens; None if `ctx.accumulate` did the work.

    `ctx.accumulate` runs the matmul and adds its result to the accumulated gradient in one pass over memory.
    """
    autograd_adds = ctx.accumulate is None or torch.is_grad_enabled() or not _is_accumulated(ctx, 1)
    if not autograd_adds and ctx.accumulate(grad.t(), x):
        return None
    return transposed_matmul(grad, x, ctx.products.weight_grad)


def _is_accumulated(ctx: Any, i: int) -> bool:
    """Return whether this backward pass accumulates the gradient of input `i` into `.grad`.

    `backward()` accumulates; `torch.autograd.grad` returns gradients instead.
    """
    return will_run(ctx.next_functions[i][0], otherwise=False)


def needs_grad(ctx: Any, i: int) -> bool:
    """Return whether this backward pass needs the gradient of input `i`.

    A pipeline may compute gradients of inputs and of weights separately (Qi et al. 2023).
    """
    if torch.compiler.is_compiling():
        # The compiler of torch 2.11 cannot trace `next_functions`, but the compiler itself removes unused gradients.
        return bool(ctx.needs_input_grad[i])
    # A bias of None has no entry in `next_functions`.
    node = ctx.next_functions[i][0] if i < len(ctx.next_functions) else None
    # If torch cannot tell whether the gradient is needed, compute it: autograd discards an unneeded gradient.
    return node is not None and will_run(node, otherwise=True)

"""Matmuls of linear layers, and which gradients a backward pass needs.

Shapes: ... any leading dimensions; i features in, o features out, n tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import onednn_linear, will_run


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] -> [..., o]; both x and weight may have any strides."""
    if onednn:
        return onednn_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def transposed_matmul(x: Tensor, y: Tensor, onednn: bool) -> Tensor:
    """Multiply the transpose of x [n, o] by y [n, i] -> [o, i].

    oneDNN copies its first factor unless that factor is row-major, so it would copy the transposed x. For a large x,
    such as the gradient of logits, copying y and the result is cheaper: y is then the first factor, and the result
    is transposed.
    """
    n, o = x.shape
    i = y.shape[1]
    if onednn and n * o > n * i + o * i:
        return matmul(y.t(), x.t(), None, onednn).t().contiguous()
    return matmul(x.t(), y.t(), None, onednn)


def gradient_of_weight(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the transpose of grad [n, o] times x [n, i], for n tokens; None if `ctx.accumulate` did the work.

    `ctx.accumulate` runs the matmul and adds its result to the accumulated gradient in one pass over memory.
    """
    if ctx.accumulate is not None and not torch.is_grad_enabled():
        # `backward()` accumulates the gradient of the weight into `.grad`; `torch.autograd.grad` returns it instead.
        accumulates = will_run(ctx.next_functions[1][0], otherwise=False)
        if accumulates and ctx.accumulate(grad.t(), x):
            return None
    return transposed_matmul(grad, x, ctx.onednn)


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

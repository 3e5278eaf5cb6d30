"""Linear function inside layers that torch.compile compiles, see `linear.py`."""

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import writes_grad
from .linear import choose_kernels, matmul, transposed_matmul
from .mesh import Axis, Options
from .parameters import spec_of
from .traced import is_traced, traced_gather


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, options: Options) -> Tensor:
    """Compute x W^T + b for the whole sequence: x [..., i] -> [..., o/t], see `linear.linear`."""
    second_kernel = choose_kernels(x, weight, options)
    if is_traced(axis):
        x = traced_gather(x, axis, options.sequence_parallel)
    if second_kernel.output:  # then a compiled layer runs all three matmuls in the second kernel
        return _matmul_op(x, weight, bias)  # type: ignore[no-any-return]
    # `_AccumulatingLinear` needs both gradients, and no autocast.
    needs_both = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    if options.wgrad_in_graph and needs_both and not torch.is_autocast_enabled(x.device.type):
        return _AccumulatingLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]
    return F.linear(x, weight, bias)  # the compiler chooses its kernel, and autograd accumulates the gradient


# Matmuls of the second kernel are registered as custom operations so that torch.compile need not trace into them.


@torch.library.custom_op("megatron::second_product", mutates_args=())
def _matmul_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b, [..., i] -> [..., o], by the second kernel."""
    return matmul(x, weight, bias, second_kernel=True)


@torch.library.custom_op("megatron::second_transposed_product", mutates_args=())
def _transposed_matmul_op(x: Tensor, y: Tensor) -> Tensor:
    """Compute x^T y, [n, o] and [n, i] -> [o, i], by the second kernel."""
    return transposed_matmul(x, y, second_kernel=True)


@_matmul_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_transposed_matmul_op.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], y.shape[1])


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])  # x and weight; no gradient needs the bias


def _matmul_op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias of `_matmul_op` from `grad` [..., o]."""
    x, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad
    flat_grad = grad.reshape(-1, grad.shape[-1])  # [tokens, o]
    input_grad = weight_grad = bias_grad = None
    if needs_input:
        input_grad = _matmul_op(grad, weight.t(), None)  # grad times weight: the operation transposes its second factor
    if needs_weight:
        weight_grad = _transposed_matmul_op(flat_grad, x.reshape(-1, x.shape[-1]))
    if needs_bias:
        bias_grad = flat_grad.sum(0)
    return input_grad, weight_grad, bias_grad


_matmul_op.register_autograd(_matmul_op_backward, setup_context=_save_factors)


class _AccumulatingLinear(torch.autograd.Function):
    """Linear function for compiled code whose backward pass calls the weight's `ParamSpec.accumulate_wgrad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return _linear_backward_op(grad, x, weight), None, bias_grad


# Address of memory -> weight, of the layers that accumulate in the graph. If a layer is recomputed in the backward
# pass, torch passes detached tensors, which lack the attributes of the weights.
weight_at: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()


# One operation computes both gradients, because the compiler would drop an operation without a result.
@torch.library.custom_op("megatron::linear_backward", mutates_args=())
def _linear_backward_op(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x [..., i] from `grad` [..., o], and accumulate the gradient of `weight` [o, i]."""
    input_grad = torch.matmul(grad, weight)
    weight = weight_at.get(weight.data_ptr(), weight)
    accumulate = spec_of(weight).accumulate_wgrad
    if accumulate is None:
        raise RuntimeError("a compiled layer lost the accumulation of its weights' gradients; use --no-compile")
    if writes_grad(weight):  # not if this backward pass computes only gradients of inputs
        flat_grad = grad.reshape(-1, grad.shape[-1])
        if not accumulate(flat_grad.t(), x.reshape(-1, x.shape[-1])):
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} has a gradient hook, which compiled layers cannot call; use "
                "--no-compile"
            )
    return input_grad


@_linear_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)

"""Linear function inside layers that torch.compile compiles, see `linear.py`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import accumulates
from .linear import matmul, products_of, transposed_matmul
from .mesh import Axis, Options
from .parameters import spec_of
from .traced import is_traced, traced_gather


def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, options: Options) -> Tensor:
    """Compute x W^T + b for the whole sequence: x [..., i] -> [..., o/t], see `linear.linear`."""
    products = products_of(x, weight, options)
    if is_traced(axis):
        x = traced_gather(x, axis, options.sequence_parallel)
    if products.output:  # a compiled layer runs all three matmuls in one kernel
        return _in_graph(x, weight, bias)  # type: ignore[no-any-return]
    if options.wgrad_in_graph and _accumulates_in_graph(x, weight):
        return _AccumulatingLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]
    return F.linear(x, weight, bias)


# Matmuls of the second kernel are registered as custom operations so that torch.compile need not trace into them.


@torch.library.custom_op("megatron::second_product", mutates_args=())
def _in_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, weight, bias, second=True)


@torch.library.custom_op("megatron::second_transposed_product", mutates_args=())
def _transposed_in_graph(x: Tensor, y: Tensor) -> Tensor:
    return transposed_matmul(x, y, second=True)


@_in_graph.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_transposed_in_graph.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], y.shape[1])


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients_in_graph(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    flat = grad.reshape(-1, grad.shape[-1])
    return (
        _in_graph(grad, weight.t(), None) if of_x else None,
        _transposed_in_graph(flat, x.reshape(-1, x.shape[-1])) if of_weight else None,
        flat.sum(0) if of_bias else None,
    )


_in_graph.register_autograd(_gradients_in_graph, setup_context=_keep_factors)


def _accumulates_in_graph(x: Tensor, weight: Tensor) -> bool:
    """Return whether compiled code may use `_AccumulatingLinear`: both gradients are needed, and autocast is off."""
    needed = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
    return needed and not torch.is_autocast_enabled(x.device.type)


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
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return _accumulate_in_graph(grad, x, weight), None, of_bias


# One operation computes both gradients, because the compiler would drop an operation without a result.
@torch.library.custom_op("megatron::linear_backward", mutates_args=())
def _accumulate_in_graph(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of x [..., i] from `grad` [..., o], and accumulate the gradient of `weight` [o, i]."""
    of_x = torch.matmul(grad, weight)
    accumulate = spec_of(weight).accumulate_wgrad
    if accumulate is None:
        raise RuntimeError("a compiled layer lost the accumulation of its weights' gradients; use --no-compile")
    if accumulates(weight):
        flat = grad.reshape(-1, grad.shape[-1])
        if not accumulate(flat.t(), x.reshape(-1, x.shape[-1])):
            raise RuntimeError(
                f"a weight of shape {tuple(weight.shape)} has a gradient hook, which compiled layers cannot call; use "
                "--no-compile"
            )
    return of_x


@_accumulate_in_graph.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape)

"""Linear function x W^T + b whose backward pass overlaps communication with computation.

The input's gradient is all-reduced over the ranks; the weight's gradient is local to each rank. So the all-reduce of
the input's gradient runs while the weight's gradient is computed (Narayanan et al. 2021; Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`). With sequence parallelism only the rank's shard of the
input is saved, and the whole input is gathered again while the input's gradient is computed (Korthikanti et al. 2022).

On a CPU torch runs fp32 matmuls in the BLAS that it was built with. MKL uses half of the AVX-512 throughput
of CPUs other than Intel's; oneDNN, which torch bundles, uses all of it.

Shapes: ... any leading dimensions, mostly s sequence, b batch; i features in, o features out, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .matmuls import Products, gradient_of_weight, matmul, needs_grad
from .mesh import Axis, Options
from .parameters import spec_of
from .sequence import Pending, start_all_gather, start_reduce_scatter

# Matmuls with fewer rows, as in decoding, are limited by reading the weights, so oneDNN would be no faster.
FEWEST_ROWS = 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, options: Options) -> Tensor:
    """Compute this rank's columns of x W^T + b for the whole sequence: x [..., i] -> [..., o/t].

    x: replicated on all ranks of `axis`, or with sequence parallelism this rank's shard [s/t, ..., i].
    weight: [o/t, i]. bias: [o/t]. `products_of` chooses the kernels.
    """
    if torch.compiler.is_compiling():
        from .compiled_linear import compiled_linear

        return compiled_linear(x, weight, bias, axis, options)
    products = products_of(x, weight, options)
    accumulate = None if products.weight_grad else accumulate_wgrad(x, weight)
    plain = axis.size == 1 and not options.fp8
    if plain and not torch.is_grad_enabled():
        return matmul(x, weight, bias, products.output)
    if plain and not any(products) and accumulate is None:
        return F.linear(x, weight, bias)
    sequence = options.sequence_axis(axis)
    more = options.overlap, products, accumulate, options.fp8
    return _Linear.apply(x, weight, bias, axis, sequence, *more)  # type: ignore[no-untyped-call,no-any-return]


def accumulate_wgrad(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], bool] | None:
    """Return `ParamSpec.accumulate_wgrad` of weight [o, i], or None if autograd must accumulate the weight's gradient.

    Autograd accumulates under autocast. It also accumulates for a weight tied to an embedding, because it must first
    sum the gradients of look-up and matmul. Compiled code uses `_AccumulatingLinear` instead.
    """
    spec = spec_of(weight)
    if spec.accumulate_wgrad is None or spec.used_as_embedding or torch.is_autocast_enabled(x.device.type):
        return None
    return spec.accumulate_wgrad


def products_of(x: Tensor, weight: Tensor, options: Options) -> Products:
    """Return the kernels for x [..., i] and weight [o, i]: `options` decide, for >= FEWEST_ROWS rows on a CPU."""
    if x.device.type != "cpu" or x.shape[:-1].numel() < FEWEST_ROWS:
        return Products()
    if options.products:
        o, i = weight.shape
        return options.products.get((x.dtype, o, i)) or options.products.get((x.dtype, 0, 0), Products())
    onednn = options.onednn and x.dtype == torch.float32
    return Products(onednn, onednn, onednn)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence: Axis,
        overlap: bool,
        products: Products,
        accumulate: Callable[[Tensor, Tensor], bool] | None,
        fp8: bool,
    ) -> Tensor:
        ctx.axis = axis
        ctx.sequence = sequence
        ctx.overlap = overlap
        ctx.products = products
        ctx.accumulate = accumulate
        ctx.fp8 = fp8
        ctx.save_for_backward(x, weight)
        whole = start_all_gather(x, sequence).wait() if sequence.size > 1 else x
        if fp8:
            from .fp8 import fp8_matmul

            return fp8_matmul(whole, weight, bias)
        return matmul(whole, weight, bias, products.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        input_grad = weight_grad = bias_grad = None
        whole = summed = None
        # The all-gather starts first, so that all ranks start the same collectives in the same order.
        if needs_grad(ctx, 1) and ctx.sequence.size > 1:
            whole = start_all_gather(x, ctx.sequence)
            if not ctx.overlap:
                whole.settle()
        if needs_grad(ctx, 0):
            summed = start_sum(_gradient_of_input(ctx, grad, weight), ctx.axis, ctx.sequence)
            if not ctx.overlap:
                summed.settle()
        flat = grad.reshape(-1, grad.shape[-1])  # [s * b, o/t]
        if needs_grad(ctx, 1):
            if whole is not None:
                x = whole.wait()
            weight_grad = gradient_of_weight(ctx, flat, x.reshape(-1, x.shape[-1]))
        if needs_grad(ctx, 2):
            bias_grad = flat.sum(0)
        if summed is not None:
            input_grad = summed.wait()
        return input_grad, weight_grad, bias_grad, *[None] * 6


def _gradient_of_input(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's part of the gradient of x: grad [..., o/t] times weight [o/t, i]."""
    if ctx.fp8:
        from .fp8 import fp8_matmul

        return fp8_matmul(grad, weight.t(), None)
    return matmul(grad, weight.t(), None, ctx.products.input_grad)


def start_sum(x: Tensor, axis: Axis, sequence: Axis) -> Pending:
    """Start an all-reduce of partial sums [s, ...], or with sequence parallelism a reduce-scatter to [s/t, ...]."""
    if sequence.size > 1:
        return start_reduce_scatter(x, sequence)
    work = None
    if axis.size > 1:
        work = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(work, x)

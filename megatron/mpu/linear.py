"""Linear function x W^T + b whose backward pass overlaps communication with computation.

The input's gradient is all-reduced over the ranks; the weight's gradient is local to each rank. So the all-reduce of
the input's gradient runs while the weight's gradient is computed (Narayanan et al. 2021; Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`). With sequence parallelism only the rank's shard of the
input is saved, and the whole input is gathered again while the input's gradient is computed (Korthikanti et al. 2022).

On a CPU torch runs fp32 matmuls in the BLAS that it was built with. MKL uses half of the AVX-512 throughput
of CPUs other than Intel's; oneDNN, which torch bundles, uses all of it. CPUs without instructions for bf16 emulate it.

Shapes: ... any leading dimensions, mostly s sequence, b batch; i features in, o features out, n tokens, t
model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .._torch import onednn_linear, will_run
from .mesh import Axis, Options
from .parameters import spec_of
from .sequence import Pending, start_all_gather, start_reduce_scatter

# Matmuls with fewer rows, as in decoding, are limited by reading the weights, so oneDNN would be no faster.
FEWEST_ROWS = 32


class Products(NamedTuple):
    """The matmuls of a linear layer that run in the second of the two kernels between which `matmul` chooses."""

    output: bool = False
    input_grad: bool = False
    weight_grad: bool = False


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
    differs = torch.is_grad_enabled() and (any(products) or accumulate is not None)
    if axis.size == 1 and not differs and not options.fp8:
        return matmul(x, weight, bias, products.output)
    how = _How(axis, options.sequence_axis(axis), options.overlap, products, accumulate, options.fp8)
    return _Linear.apply(x, weight, bias, how)  # type: ignore[no-untyped-call,no-any-return]


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
    onednn = options.onednn and x.dtype == torch.float32
    others = options.products.get((x.dtype, 0, 0), Products(onednn, onednn, onednn))
    return options.products.get((x.dtype, *weight.shape), others)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, second: bool) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] -> [..., o]; both x and weight may have any strides.

    second: use a kernel that is faster than torch's own on some CPUs. For fp32 this is oneDNN's. For 16 bits it is the
    kernel for fp32, with the result rounded.
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


class _How(NamedTuple):
    """How a linear function is computed: its ranks, and what `Options` and `accumulate_wgrad` say."""

    axis: Axis
    sequence: Axis
    overlap: bool
    products: Products
    accumulate: Callable[[Tensor, Tensor], bool] | None
    fp8: bool

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, second: bool) -> Tensor:
        """Multiply x [..., i] by the transpose of weight [o, i], in fp8 if the layer does -> [..., o]."""
        if self.fp8:
            from .fp8 import fp8_matmul

            return fp8_matmul(x, weight, bias)
        return matmul(x, weight, bias, second)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(x, weight)
        whole = start_all_gather(x, how.sequence).wait() if how.sequence.size > 1 else x
        return how.matmul(whole, weight, bias, how.products.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        how: _How = ctx.how
        input_grad = weight_grad = bias_grad = None
        whole = summed = None
        # The all-gather starts first, so that all ranks start the same collectives in the same order.
        if needs_grad(ctx, 1) and how.sequence.size > 1:
            whole = start_all_gather(x, how.sequence)
            if not how.overlap:
                whole.settle()
        if needs_grad(ctx, 0):
            summed = start_sum(how.matmul(grad, weight.t(), None, how.products.input_grad), how.axis, how.sequence)
            if not how.overlap:
                summed.settle()
        flat = grad.reshape(-1, grad.shape[-1])  # [s * b, o/t]
        if needs_grad(ctx, 1):
            if whole is not None:
                x = whole.wait()
            weight_grad = _gradient_of_weight(ctx, flat, x.reshape(-1, x.shape[-1]))
        if needs_grad(ctx, 2):
            bias_grad = flat.sum(0)
        if summed is not None:
            input_grad = summed.wait()
        return input_grad, weight_grad, bias_grad, None


def _gradient_of_weight(ctx: Any, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the transpose of grad [n, o] times x [n, i], for n tokens; None if `accumulate` did the work.

    `accumulate` runs the matmul and adds its result to the accumulated gradient in one pass over memory.
    """
    accumulate = ctx.how.accumulate
    if accumulate is not None and not torch.is_grad_enabled():
        # `backward()` accumulates the gradient of the weight into `.grad`; `torch.autograd.grad` returns it instead.
        accumulates = will_run(ctx.next_functions[1][0], otherwise=False)
        if accumulates and accumulate(grad.t(), x):
            return None
    return transposed_matmul(grad, x, ctx.how.products.weight_grad)


def start_sum(x: Tensor, axis: Axis, sequence: Axis) -> Pending:
    """Start an all-reduce of partial sums [s, ...], or with sequence parallelism a reduce-scatter to [s/t, ...]."""
    if sequence.size > 1:
        return start_reduce_scatter(x, sequence)
    work = None
    if axis.size > 1:
        work = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(work, x)

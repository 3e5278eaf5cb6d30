"""Linear function x W^T + b whose backward pass overlaps communication with computation.

The input's gradient is all-reduced over the ranks while the weight's gradient, which is local to each rank, is computed
(Narayanan et al. 2021; Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`). With sequence parallelism only
the rank's shard of the input is saved, and the input is gathered again meanwhile (Korthikanti et al. 2022).

Shapes: ... leading dimensions; s sequence, b batch; i features in, o features out; n tokens; t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import onednn_linear, will_run
from ..autocast import in_autocast_dtype
from .mesh import Axis, Options
from .parameters import spec_of
from .sequence import Pending, start_all_gather, start_all_reduce, start_reduce_scatter

# Matmuls with fewer rows mostly wait for the weight, so what was measured with more rows does not hold for them.
MIN_ROWS = 32


class SecondKernelUse(NamedTuple):
    """The matmuls of a linear layer that run in the second of the two kernels between which `matmul` chooses."""

    output: bool = False
    input_grad: bool = False
    weight_grad: bool = False


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, options: Options) -> Tensor:
    """Compute this rank's columns of x W^T + b for the whole sequence: x [..., i] -> [..., o/t].

    x: replicated on all ranks of `axis`, or with sequence parallelism this rank's shard [s/t, ..., i].
    weight: [o/t, i]. bias: [o/t]. On a CPU, some matmuls may use a second kernel, see `matmul`.
    """
    if torch.compiler.is_compiling():
        from .compiled_linear import compiled_linear

        return compiled_linear(x, weight, bias, axis, options)
    if hasattr(weight, "packed"):  # fp32 on a CPU, not in training, see features/cpu_matmul.py
        return onednn_linear(x, weight.packed, bias)
    x, weight, bias = in_autocast_dtype(x, weight, bias)
    second_kernel = choose_kernels(x, weight, options)  # whether output, input_grad and weight_grad use it
    # `accumulate_wgrad` has a matmul of its own, so the second kernel leaves the accumulation to autograd.
    accumulate = None if second_kernel.weight_grad else wgrad_accumulator(x, weight)
    has_custom_backward = any(second_kernel) or accumulate is not None
    # torch's own linear function lacks communication, fp8, the second kernel, and accumulation into a buffer.
    if axis.size > 1 or options.fp8 or (has_custom_backward and torch.is_grad_enabled()):
        plan = _LinearPlan(axis, options.sequence_axis(axis), options.overlap, second_kernel, accumulate, options.fp8)
        return _Linear.apply(x, weight, bias, plan)  # type: ignore[no-untyped-call,no-any-return]
    return matmul(x, weight, bias, second_kernel.output)


def wgrad_accumulator(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], bool] | None:
    """Return `ParamSpec.accumulate_wgrad` of weight [o, i], or None if autograd must accumulate the weight's gradient.

    Autograd accumulates under autocast. It also accumulates for a weight tied to an embedding, because it must first
    sum the gradients of look-up and matmul. Compiled code uses `_AccumulatingLinear` instead.
    """
    spec = spec_of(weight)
    if spec.accumulate_wgrad is None or spec.used_as_embedding or torch.is_autocast_enabled(x.device.type):
        return None
    return spec.accumulate_wgrad


def choose_kernels(x: Tensor, weight: Tensor, options: Options) -> SecondKernelUse:
    """Return which matmuls of a layer with input x [..., i] and weight [o, i] use the second kernel; none on a GPU."""
    if x.device.type != "cpu" or x.shape[:-1].numel() < MIN_ROWS:
        return SecondKernelUse()  # no matmul uses it
    # An entry for the weight's shape overrides one for the dtype, which overrides `options.onednn`.
    use_onednn = options.onednn and x.dtype == torch.float32
    by_option = SecondKernelUse(use_onednn, use_onednn, use_onednn)
    by_dtype = options.second_kernel.get((x.dtype, 0, 0), by_option)  # 0, 0: weights without an entry of their own
    return options.second_kernel.get((x.dtype, *weight.shape), by_dtype)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, second_kernel: bool) -> Tensor:
    """Multiply x [..., i] by the transpose of weight [o, i] -> [..., o]; both x and weight may have any strides.

    second_kernel: use a kernel that is faster on some CPUs: oneDNN's for fp32, `half_linear` for 16 bits.
    """
    if not second_kernel:
        return F.linear(x, weight, bias)
    if x.dtype == torch.float32:
        return onednn_linear(x, weight, bias)
    from .half_linear import half_linear

    return half_linear(x, weight, bias)


def transposed_matmul(x: Tensor, y: Tensor, second_kernel: bool) -> Tensor:
    """Multiply the transpose of x [n, o] by y [n, i] -> [o, i].

    oneDNN copies its first factor unless that factor is row-major, so it would copy the transposed x. For a large x,
    such as the gradient of logits, copying y and the result is cheaper: y is then the first factor, and the result
    is transposed.
    """
    n, o = x.shape
    i = y.shape[1]
    copying_x_is_dearer = n * o > n * i + o * i  # elements of x, against those of y and of the result
    if second_kernel and x.dtype == torch.float32 and copying_x_is_dearer:
        return matmul(y.t(), x.t(), None, second_kernel).t().contiguous()
    return matmul(x.t(), y.t(), None, second_kernel)


def needs_grad(ctx: Any, i: int) -> bool:
    """Return whether this backward pass needs the gradient of input `i`.

    A pipeline may compute gradients of inputs and of weights separately (Qi et al. 2023).
    """
    if torch.compiler.is_compiling():
        # The compiler of torch 2.11 cannot trace `next_functions`, but the compiler itself removes unused gradients.
        return bool(ctx.needs_input_grad[i])
    # Entry i is (node that gets the gradient of input i, ...). A bias of None, the last input, has no entry.
    node = ctx.next_functions[i][0] if i < len(ctx.next_functions) else None
    # If torch cannot tell whether the gradient is needed, compute it: autograd discards an unneeded gradient.
    return node is not None and will_run(node, default=True)


class _LinearPlan(NamedTuple):
    """How a linear function is computed: its ranks, and what `Options` and `accumulate_wgrad` say."""

    axis: Axis
    sequence: Axis
    overlap: bool
    second_kernel: SecondKernelUse
    accumulate: Callable[[Tensor, Tensor], bool] | None
    fp8: bool

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, second_kernel: bool) -> Tensor:
        """Multiply x [..., i] by the transpose of weight [o, i], in fp8 if the layer does -> [..., o]."""
        if self.fp8:
            from .fp8 import fp8_matmul

            return fp8_matmul(x, weight, bias)
        return matmul(x, weight, bias, second_kernel)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _LinearPlan) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(x, weight)
        whole_x = start_all_gather(x, plan.sequence).wait() if plan.sequence.size > 1 else x
        return plan.matmul(whole_x, weight, bias, plan.second_kernel.output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the inputs 0 x, 1 weight and 2 bias; grad [..., o/t] is that of the output."""
        x, weight = ctx.saved_tensors
        plan: _LinearPlan = ctx.plan
        if torch.is_grad_enabled():  # create_graph=True needs second derivatives, which oneDNN lacks
            plan = plan._replace(second_kernel=SecondKernelUse())
        input_grad = weight_grad = bias_grad = pending_x = pending_grad = None
        # The all-gather starts first, so that all ranks start the same collectives in the same order.
        if needs_grad(ctx, 1) and plan.sequence.size > 1:
            pending_x = start_all_gather(x, plan.sequence)
            if not plan.overlap:
                pending_x.block()  # wait now, not only where the result is needed
        if needs_grad(ctx, 0):
            partial_grad = plan.matmul(grad, weight.t(), None, plan.second_kernel.input_grad)
            pending_grad = start_reduction(partial_grad, plan.axis, plan.sequence)
            if not plan.overlap:
                pending_grad.block()
        # The gradients of weight and bias are computed while the input's gradient is reduced.
        flat_grad = grad.reshape(-1, grad.shape[-1])  # [s * b, o/t]
        if needs_grad(ctx, 1):
            if pending_x is not None:
                x = pending_x.wait()
            weight_grad = _weight_gradient(ctx, plan, flat_grad, x.reshape(-1, x.shape[-1]))
        if needs_grad(ctx, 2):
            bias_grad = flat_grad.sum(0)
        if pending_grad is not None:
            input_grad = pending_grad.wait()
        return input_grad, weight_grad, bias_grad, None


def _weight_gradient(ctx: Any, plan: _LinearPlan, grad: Tensor, x: Tensor) -> Tensor | None:
    """Return the transpose of grad [n, o] times x [n, i], for n tokens; None if `accumulate` did the work.

    `accumulate` runs the matmul and adds its result to the accumulated gradient in one pass over memory.
    """
    accumulate = plan.accumulate
    # Gradients are enabled in a backward pass only with create_graph=True: then the result must be part of the graph.
    if accumulate is not None and not torch.is_grad_enabled():
        # `backward()` accumulates the gradient of the weight into `.grad`; `torch.autograd.grad` returns it instead.
        is_backward_call = will_run(ctx.next_functions[1][0], default=False)
        if is_backward_call and accumulate(grad.t(), x):
            return None
    return transposed_matmul(grad, x, plan.second_kernel.weight_grad)


def start_reduction(x: Tensor, axis: Axis, sequence: Axis) -> Pending:
    """Start an all-reduce of partial sums [s, ...], or with sequence parallelism a reduce-scatter to [s/t, ...]."""
    if sequence.size > 1:
        return start_reduce_scatter(x, sequence)
    return start_all_reduce(x, axis)

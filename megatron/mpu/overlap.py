"""A product split by columns whose backward pass talks to the other ranks while it computes.

The gradient of the input is a sum over the ranks, that of the weight is each rank's own: so the sum is
under way while the weight's gradient is computed (Narayanan et al. 2021; in Megatron-LM
`LinearWithGradAccumulationAndAsyncCommunication`). With sequence parallelism only the rank's own stretch of
the input is kept, and gathered once more while the input's gradient is computed (Korthikanti et al. 2022).

Shapes: ... s, b sequence and batch or any others, i features in, o features out, t model-parallel ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .mesh import Axis
from .sequence import Pending, start_all_gather, start_reduce_scatter


def linear_over_ranks(x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
    """x [..., i], the same on all ranks, or with sequence parallelism [s/t, ..., i] -> [..., o/t] of the whole sequence."""
    return _Linear.apply(x, weight, bias, axis)  # type: ignore[no-untyped-call,no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x, weight)
        return F.linear(start_all_gather(x, axis).wait() if axis.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = (is_asked_for(ctx, i) for i in range(3))
        # Started first, so that all ranks start the same collectives in the same order.
        whole = start_all_gather(x, ctx.axis) if of_weight and ctx.axis.sequence_parallel else None
        summed = _start_sum(grad @ weight, ctx.axis) if of_x else None
        weight_grad = bias_grad = None
        flat = grad.reshape(-1, grad.shape[-1])  # [s b, o/t]
        if of_weight:
            x = whole.wait() if whole is not None else x
            weight_grad = flat.t() @ x.reshape(-1, x.shape[-1])
        if of_bias:
            bias_grad = flat.sum(0)
        return summed.wait() if summed is not None else None, weight_grad, bias_grad, None


def _start_sum(x: Tensor, axis: Axis) -> Pending:
    if axis.sequence_parallel:
        return start_reduce_scatter(x, axis)
    return Pending(dist.all_reduce(x, group=axis.group, async_op=True), x)


def is_asked_for(ctx: Any, i: int) -> bool:
    """Whether this backward pass goes on to input `i`: a pipeline may ask for inputs and weights apart (Qi et al. 2023)."""
    behind = ctx.next_functions[i][0] if i < len(ctx.next_functions) else None  # a bias of None is not counted
    if behind is None:
        return False
    try:
        return torch._C._will_engine_execute_node(behind)
    except RuntimeError:
        return True  # within torch.autograd.grad torch does not say; what nobody wants is dropped

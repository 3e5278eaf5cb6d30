"""Cross entropy over a vocabulary whose logits are split over the model-parallel ranks.

Only three numbers per token cross the ranks (the maximum, the sum of exponentials and the
target's logit), never a logit matrix. Padding rows count as minus infinity.

Shapes: ... any leading dimensions (tokens), v/t this rank's rows of the padded vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, current


def _total(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, label_smoothing: float, axis: Axis
    ) -> Tensor:
        rows = logits.shape[-1]
        first = axis.rank * rows
        real = max(0, min(rows, vocab_size - first))  # rows of this rank that are not padding
        dtype = torch.promote_types(logits.dtype, torch.float32)
        x = logits[..., :real]
        # torch's softmax is one fast pass on every device; what the other ranks hold only scales it.
        softmax = torch.softmax(x, dim=-1, dtype=dtype)  # [..., v/t] the one copy in fp32 (fp64 stays fp64)
        if real:
            top, of_top = x.amax(dim=-1).to(dtype), softmax.amax(dim=-1)
        else:  # nothing but padding on this rank
            top = torch.full(target.shape, -torch.inf, dtype=dtype, device=logits.device)
            of_top = torch.ones_like(top)
        shift = _total(top.clone(), axis, dist.ReduceOp.MAX)
        own_sum = (top - shift).exp() / of_top  # of exponentials
        sum_exp = _total(own_sum.clone(), axis)

        local = target - first
        mine = (local >= 0) & (local < real)
        local = local.masked_fill(~mine, 0)
        target_logit = torch.zeros_like(top)
        if real:
            target_logit = torch.where(mine, x.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(dtype) - shift, 0.0)
        log_z = sum_exp.log()  # less shift, as the logits below
        target_logit = _total(target_logit, axis)
        loss = log_z - target_logit
        if label_smoothing:
            mean_logit = _total(x.sum(dim=-1, dtype=dtype), axis) / vocab_size - shift
            loss = (1 - label_smoothing) * loss + label_smoothing * (log_z - mean_logit)

        ctx.save_for_backward(softmax, own_sum / sum_exp, local, mine)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, vocab_size
        ctx.padding, ctx.dtype = rows - real, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        softmax, share, local, mine = ctx.saved_tensors
        eps = ctx.label_smoothing
        real = softmax.shape[-1]
        whole = softmax.new_empty(*softmax.shape[:-1], real + ctx.padding)
        whole[..., real:] = 0.0
        d = whole[..., :real]
        torch.mul(softmax, (grad * share).unsqueeze(-1), out=d)
        if eps:
            d -= (eps / ctx.vocab_size * grad).unsqueeze(-1)
        if real:
            d.scatter_add_(-1, local.unsqueeze(-1), ((eps - 1) * mine * grad).unsqueeze(-1))
        return whole.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    axis: Axis | None = None,
) -> Tensor:
    """Per-token loss in nats, [...] in fp32 (fp64 for fp64 logits).

    logits: [..., v/t], any float dtype, not overwritten. target: [...] ids < vocab_size.
    vocab_size: number of real rows, padding left out; by default all rows are real.
    label_smoothing: weight of the uniform distribution over the vocabulary (Szegedy et al. 2016).
    """
    axis = axis or current().model
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    return _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call,no-any-return]
        logits, target, vocab_size, label_smoothing, axis
    )

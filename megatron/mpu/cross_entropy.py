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
        # One fp32 copy (fp64 stays fp64): the caller's logits are never written to.
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # [..., v/t]
        x[..., real:] = -torch.inf

        x -= _total(x.amax(dim=-1), axis, dist.ReduceOp.MAX).unsqueeze(-1)
        local = target - first
        mine = (local >= 0) & (local < real)
        picked = x.gather(-1, local.masked_fill(~mine, 0).unsqueeze(-1)).squeeze(-1)
        target_logit = _total(torch.where(mine, picked, 0.0), axis)  # [...]
        mean_logit = None
        if label_smoothing:
            mean_logit = _total(x[..., :real].sum(dim=-1), axis) / vocab_size
        sum_exp = _total(x.exp_().sum(dim=-1), axis)  # x now holds exponentials
        log_z = sum_exp.log()
        loss = log_z - target_logit
        if mean_logit is not None:
            loss = (1 - label_smoothing) * loss + label_smoothing * (log_z - mean_logit)

        softmax = x.div_(sum_exp.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, mine)
        ctx.label_smoothing, ctx.vocab_size, ctx.real, ctx.dtype = label_smoothing, vocab_size, real, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        softmax, local, mine = ctx.saved_tensors
        d = softmax.clone()
        eps = ctx.label_smoothing
        hit = (mine * (1 - eps)).unsqueeze(-1).to(d.dtype)
        d.scatter_add_(-1, local.masked_fill(~mine, 0).unsqueeze(-1), -hit)
        if eps:
            d[..., : ctx.real] -= eps / ctx.vocab_size
        return d.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None, None


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

"""Cross entropy over a vocabulary whose logits are split over the model-parallel ranks.

Only three numbers per token cross the ranks (the maximum, the sum of exponentials and the
target's logit), never a logit matrix. Padding rows count as minus infinity. No more than a chunk
of the logits is in fp32 at any time.

Shapes: ... any leading dimensions (tokens), v/t this rank's rows of the padded vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import Axis, current


def _total(x: Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


CHUNK, CPU_CHUNK = 1 << 24, 1 << 20  # logits that are in fp32 at the same time: 64 MiB, or what caches hold


def _chunks(logits: Tensor) -> list[slice]:
    """Stretches of tokens [n, v/t] whose logits make a chunk each."""
    step = max(1, (CPU_CHUNK if logits.device.type == "cpu" else CHUNK) // max(1, logits.shape[-1]))
    return [slice(at, at + step) for at in range(0, logits.shape[0], step)]


def _alone(x: Tensor, target: Tensor, dtype: torch.dtype, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The losses and log Z where this rank has all logits [n, v]: in one pass."""
    loss, log_z = (torch.empty_like(target, dtype=dtype) for _ in range(2))
    for chunk in _chunks(x):
        logs, at = torch.log_softmax(x[chunk], dim=-1, dtype=dtype), target[chunk].unsqueeze(-1)
        loss[chunk] = -logs.gather(-1, at).squeeze(-1)
        log_z[chunk] = x[chunk].gather(-1, at).squeeze(-1).to(dtype) + loss[chunk]
        if label_smoothing:
            loss[chunk] = (1 - label_smoothing) * loss[chunk] - label_smoothing * logs.mean(-1)
    return loss, log_z


def _together(
    x: Tensor, target: Tensor, dtype: torch.dtype, label_smoothing: float, vocab_size: int, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's share of each token's probability, the losses and log Z. x: its logits; target: -1 where another rank has it.

    torch's softmax is one fast pass on every device; what the other ranks hold only scales it.
    """
    # A rank with nothing but padding adds nothing: its maximum is minus infinity.
    real = x.shape[-1]
    top = x.amax(dim=-1).to(dtype) if real else torch.full_like(target, -torch.inf, dtype=dtype)
    of_top = torch.ones_like(top)  # probability of the maximum among the logits of this rank
    for chunk in _chunks(x) if real else []:
        of_top[chunk] = torch.softmax(x[chunk], dim=-1, dtype=dtype).amax(dim=-1)

    shift = _total(top.clone(), axis, dist.ReduceOp.MAX)
    own_sum = (top - shift).exp() / of_top  # of exponentials, less shift, as all that follows
    sum_exp = _total(own_sum.clone(), axis)
    target_logit = torch.zeros_like(top)
    if real:
        found = x.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(dtype)
        target_logit = torch.where(target >= 0, found - shift, 0.0)
    log_z = sum_exp.log()
    loss = log_z - _total(target_logit, axis)
    if label_smoothing:
        mean_logit = _total(x.sum(dim=-1, dtype=dtype), axis) / vocab_size - shift
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_z - mean_logit)
    return own_sum / sum_exp, loss, log_z + shift


class Found(NamedTuple):
    """What the gradient of the logits of tokens [n] is made of, besides these.

    share: of each token's probability, what this rank's logits hold, [n]; with z-loss times its gradient's 1 + 2 c log Z. target: the row
    of the target among this rank's, 0 where another has it; mine: whether this rank has it, both [n]. real: rows that are not padding.
    """

    share: Tensor
    target: Tensor
    mine: Tensor
    real: int


def find(
    logits: Tensor, target: Tensor, vocab_size: int, axis: Axis, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, Found]:
    """logits [n, v/t], target [n] -> the losses and c (log Z)^2 with c = z_loss, [n] each in fp32 (fp64 for fp64 logits), and what `gradient` asks for."""
    rows = logits.shape[-1]
    first = axis.rank * rows
    real = max(0, min(rows, vocab_size - first))  # rows of this rank that are not padding
    dtype = torch.promote_types(logits.dtype, torch.float32)
    local = target - first
    mine = (local >= 0) & (local < real)
    local = local.masked_fill(~mine, 0)
    x = logits[:, :real]
    if axis.size == 1:
        share = torch.ones_like(target, dtype=dtype)
        loss, log_z = _alone(x, local, dtype, label_smoothing)
    else:
        share, loss, log_z = _together(x, torch.where(mine, local, -1), dtype, label_smoothing, vocab_size, axis)
    if z_loss:
        share = share * (1 + 2 * z_loss * log_z)  # of (log Z)^2 the gradient is 2 log Z times the probabilities
    return loss, z_loss * log_z**2, Found(share, local, mine, real)


def gradient(
    logits: Tensor,
    found: Found,
    grad: Tensor,
    smoothed: float = 0.0,
    label_smoothing: float = 0.0,
    overwrite: bool = False,
) -> Tensor:
    """Of the losses [n] (and their z-loss), whose gradient is `grad` [n], with respect to logits [n, v/t]: of their shape and dtype.

    smoothed: what label smoothing takes from each row of the vocabulary, label_smoothing / v. overwrite: into the memory of the logits.
    """
    real = found.real
    out = logits if overwrite else torch.empty_like(logits, memory_format=torch.contiguous_format)
    out[:, real:] = 0.0
    for chunk in _chunks(logits) if real else []:
        same = out.dtype == grad.dtype and not overwrite  # then no copy is needed
        d = torch.softmax(logits[chunk, :real], dim=-1, dtype=grad.dtype, out=out[chunk, :real] if same else None)
        d *= (grad[chunk] * found.share[chunk]).unsqueeze(-1)
        if smoothed:
            d -= (smoothed * grad[chunk]).unsqueeze(-1)
        of_target = (label_smoothing - 1) * found.mine[chunk] * grad[chunk]
        d.scatter_add_(-1, found.target[chunk].unsqueeze(-1), of_target.unsqueeze(-1))
        if not same:
            out[chunk, :real] = d
    return out


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """On [n, v/t]. Probabilities are computed again for the backward pass, chunk by chunk, and never stored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        vocab_size: int,
        label_smoothing: float,
        z_loss: float,
        axis: Axis,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        loss, z, found = find(logits, target, vocab_size, axis, label_smoothing, z_loss)
        ctx.save_for_backward(logits, *found[:3])
        ctx.label_smoothing, ctx.smoothed, ctx.real = label_smoothing, label_smoothing / vocab_size, found.real
        ctx.overwrite, ctx.overwritten = overwrite, False
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.overwritten:
            raise RuntimeError(
                "this loss was differentiated before, and its logits hold their gradient since: compute it again, or by "
                "mpu.vocab_parallel_cross_entropy, which leaves logits as they are"
            )
        logits, share, local, mine = ctx.saved_tensors
        found, ctx.overwritten = Found(share, local, mine, ctx.real), ctx.overwrite
        return gradient(logits, found, grad, ctx.smoothed, ctx.label_smoothing, ctx.overwrite), *[None] * 6


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
    return vocab_parallel_losses(logits, target, vocab_size, label_smoothing, 0.0, axis)[0]


def vocab_parallel_losses(
    logits: Tensor,
    target: Tensor,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    axis: Axis | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The cross entropy of each token, and its z-loss, [...] each; other arguments as in `vocab_parallel_cross_entropy`.

    z_loss: c of c (log Z)^2, which keeps the sum Z of exponentials near 1 (Chowdhery et al. 2022). The gradient of the first is that of the
    sum of both, so that who learns from it reads the cross entropy; the second has none.
    overwrite: the backward pass writes the gradient of the logits over them, as they and it are the largest activations of most models. Who
    else needs the logits for a gradient gets autograd's error, and a second backward pass a RuntimeError.
    """
    axis = axis or current().model
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    flat = logits.reshape(-1, logits.shape[-1])
    losses, z = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, target.reshape(-1), vocab_size, label_smoothing, z_loss, axis, overwrite
    )
    return losses.view(target.shape), z.view(target.shape)


@torch.no_grad()
def vocab_parallel_right(
    logits: Tensor, target: Tensor, vocab_size: int | None = None, axis: Axis | None = None
) -> Tensor:
    """Whether each target has the largest logit, [...] bool; one that shares it with another counts as right.

    Arguments as in `vocab_parallel_cross_entropy`.
    """
    axis = axis or current().model
    rows = logits.shape[-1]
    first = axis.rank * rows
    real = max(0, min(rows, (vocab_size or rows * axis.size) - first))
    # The largest logit and that of the target, as far as this rank has them.
    best = logits.new_full((2, *target.shape), -torch.inf, dtype=torch.promote_types(logits.dtype, torch.float32))
    if real:
        x, local = logits[..., :real], target - first
        found = x.gather(-1, local.clamp(0, real - 1).unsqueeze(-1)).squeeze(-1)
        best[0], best[1] = x.amax(-1), torch.where((local >= 0) & (local < real), found, -torch.inf)
    largest, own = _total(best, axis, dist.ReduceOp.MAX)
    right: Tensor = own == largest
    return right

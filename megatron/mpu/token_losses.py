"""Losses of tokens over a sharded vocabulary, and their gradient with respect to the logits, without autograd.

Shapes: n tokens, v/t this rank's rows of the padded vocabulary. Z is a token's sum of exp(logit) over the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .mesh import Axis
from .vocab_shards import largest, total

# Number of logits per chunk: 64 MiB in fp32 on accelerators, and 4 MiB on a CPU, where a chunk should fit its cache.
CHUNK = 1 << 24
CPU_CHUNK = 1 << 20


def chunks_of(logits: Tensor, size: int | None = None) -> list[slice]:
    """Cut the n tokens of logits [n, v/t] into slices of at most `size` logits, by default CHUNK or CPU_CHUNK."""
    size = size or (CPU_CHUNK if logits.device.type == "cpu" else CHUNK)
    step = max(1, size // max(1, logits.shape[-1]))
    if step > 8:
        step -= step % 8  # compiled kernels would copy slices whose addresses are not multiples of 16 bytes
    return [slice(at, at + step) for at in range(0, logits.shape[0], step)]


def _losses_on_one_rank(x: Tensor, target: Tensor, dtype: torch.dtype, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Return each token's loss and log Z, [n] each, when this rank holds all logits x [n, v]. Z: sum of exp(logit)."""
    loss = torch.empty_like(target, dtype=dtype)
    log_z = torch.empty_like(loss)
    for chunk in chunks_of(x):
        logs = torch.log_softmax(x[chunk], dim=-1, dtype=dtype)
        at = target[chunk].unsqueeze(-1)
        loss[chunk] = -logs.gather(-1, at).squeeze(-1)
        log_z[chunk] = x[chunk].gather(-1, at).squeeze(-1).to(dtype) + loss[chunk]
        if label_smoothing:
            loss[chunk] = (1 - label_smoothing) * loss[chunk] - label_smoothing * logs.mean(-1)
    return loss, log_z


def _losses_over_ranks(
    logits: Tensor, real: int, target: Tensor, label_smoothing: float, vocab_size: int, axis: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [n]: this rank's share of each token's probability mass, the token's loss, and log Z.

    Z, the sum of exp(logit), and the loss are over the logits of all ranks.
    logits: [n, v/t] of this rank. real: number of its rows that are not padding.
    target: the local row of each target, -1 if another rank holds it.
    Each rank runs torch's softmax, one fast pass over its own logits, and then rescales the result by the maximum
    and the sum over all ranks.
    """
    # A rank that holds only padding contributes nothing: its maximum is minus infinity.
    x = logits[:, :real]
    dtype = torch.promote_types(x.dtype, torch.float32)
    top = torch.full_like(target, -torch.inf, dtype=dtype)
    of_top = torch.ones_like(top)  # probability of this rank's largest logit among its own logits
    if real:
        top = x.amax(dim=-1).to(dtype)
        for chunk in chunks_of(x):
            of_top[chunk] = torch.softmax(x[chunk], dim=-1, dtype=dtype).amax(dim=-1)

    shift = largest(top, logits, axis)
    own_sum = (top - shift).exp() / of_top  # this rank's sum of exp(logit - shift)
    sum_exp = total(own_sum.clone(), axis)
    log_sum = sum_exp.log()
    loss = loss_of(x, target, shift, log_sum, label_smoothing, vocab_size, axis)
    return own_sum / sum_exp, loss, log_sum + shift


def loss_of(
    x: Tensor, target: Tensor, top: Tensor, log_sum: Tensor, label_smoothing: float, vocab_size: int, axis: Axis
) -> Tensor:
    """Return each token's loss [n] from log sum exp(logit - top) over all ranks; see `_losses_over_ranks`."""
    target_logit = torch.zeros_like(top)
    if x.shape[-1]:
        found = x.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(top.dtype)
        target_logit = torch.where(target >= 0, found - top, 0.0)
    loss = log_sum - total(target_logit, axis)
    if label_smoothing:
        mean_logit = total(x.sum(dim=-1, dtype=top.dtype), axis) / vocab_size - top
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - mean_logit)
    return loss


def on_cuda(logits: Tensor) -> bool:
    """Return whether the fused functions compute the loss of logits [n, v/t] and its gradient."""
    return logits.is_cuda


class LossState(NamedTuple):
    """Values that `gradient` needs in addition to the logits, for n tokens.

    share: [n] this rank's share of each token's probability mass, but 1 on CUDA. With the z-loss c (log Z)^2, it is
    multiplied by 1 + 2 c log Z, where Z is the sum of exp(logit) over the vocabulary.
    top, log_sum: [n] the largest logit and log sum exp(logit - largest); only CUDA uses them.
    target: [n] the target's index among this rank's vocabulary rows, 0 if another rank holds the target.
    mine: [n] whether this rank holds the target.
    real: number of this rank's rows that are not padding.
    """

    share: Tensor
    top: Tensor
    log_sum: Tensor
    target: Tensor
    mine: Tensor
    real: int


def on_this_rank(logits: Tensor, target: Tensor, vocab_size: int, axis: Axis) -> tuple[Tensor, Tensor, int]:
    """Return each target's local row [...], whether this rank holds it [...], and the rank's number of unpadded rows.

    A target that another rank holds gets row 0 and False.
    """
    rows = logits.shape[-1]
    first = axis.rank * rows
    real = max(0, min(rows, vocab_size - first))
    local = target - first
    mine = (local >= 0) & (local < real)
    return local.masked_fill(~mine, 0), mine, real


def compute_losses(
    logits: Tensor, target: Tensor, vocab_size: int, axis: Axis, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, LossState]:
    """Compute the losses and z-losses, [n] each, and the values that `gradient` needs.

    logits: [n, v/t]. target: [n]. The z-loss is z_loss * (log Z)^2, where Z is the sum of exp(logit). Both
    losses are fp32 (fp64 for fp64 logits).
    """
    local, mine, real = on_this_rank(logits, target, vocab_size, axis)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    share = top = log_sum = torch.ones_like(target, dtype=dtype)
    elsewhere = torch.where(mine, local, -1)
    if on_cuda(logits):
        from .fused_cross_entropy import fused_losses

        loss, top, log_sum = fused_losses(logits, real, elsewhere, label_smoothing, vocab_size, axis)
        log_z = top + log_sum
    elif axis.size == 1:
        loss, log_z = _losses_on_one_rank(logits[:, :real], local, dtype, label_smoothing)
    else:
        share, loss, log_z = _losses_over_ranks(logits, real, elsewhere, label_smoothing, vocab_size, axis)
    if z_loss:
        share = share * (1 + 2 * z_loss * log_z)  # the gradient of (log Z)^2 is 2 log Z times the probabilities
    return loss, z_loss * log_z**2, LossState(share, top, log_sum, local, mine, real)


def gradient(
    logits: Tensor,
    found: LossState,
    grad: Tensor,
    smoothed: float = 0.0,
    label_smoothing: float = 0.0,
    overwrite: bool = False,
) -> Tensor:
    """Return the gradient of the losses with respect to logits [n, v/t], in the logits' shape and dtype.

    grad: [n] incoming gradient of each token's loss, which is cross entropy plus z-loss.
    smoothed: label_smoothing / vocabulary size, which label smoothing subtracts from the gradient of every logit.
    overwrite: write the result into the memory of the logits.
    """
    if on_cuda(logits):
        from .fused_cross_entropy import fused_gradient

        return fused_gradient(logits, found, grad, smoothed, label_smoothing, overwrite)
    real = found.real
    out = logits if overwrite else torch.empty_like(logits, memory_format=torch.contiguous_format)
    out[:, real:] = 0.0
    if not real:
        return out
    same = out.dtype == grad.dtype and not overwrite  # If True, softmax writes its result directly to `out`.
    for chunk in chunks_of(logits):
        place = out[chunk, :real] if same else None
        d = torch.softmax(logits[chunk, :real], dim=-1, dtype=grad.dtype, out=place)
        d *= (grad[chunk] * found.share[chunk]).unsqueeze(-1)
        if smoothed:
            d -= (smoothed * grad[chunk]).unsqueeze(-1)
        of_target = found.mine[chunk] * grad[chunk] * (label_smoothing - 1)
        d.scatter_add_(-1, found.target[chunk].unsqueeze(-1), of_target.unsqueeze(-1))
        if not same:
            out[chunk, :real] = d
    return out

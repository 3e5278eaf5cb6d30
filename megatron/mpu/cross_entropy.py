"""Cross entropy over a vocabulary whose logits are sharded over the model-parallel ranks.

Ranks exchange only three numbers per token: the largest logit, the sum of exponentials and the target's logit. No
logit matrix is communicated. Logits of padding rows count as minus infinity. At any time only one chunk of the
logits is held in fp32.

Shapes: ... any leading dimensions (tokens), n tokens, v/t this rank's rows of the padded vocabulary. Z is a token's
sum of exp(logit) over the vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .current import current
from .mesh import Axis
from .vocab_shards import largest, refuse_other_tokens, total

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


def _losses_on_one_rank(x: Tensor, target: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return each token's loss and log Z, [n] each, when this rank holds all logits x [n, v]."""
    loss = torch.empty_like(target, dtype=dtype)
    log_z = torch.empty_like(loss)
    for chunk in chunks_of(x):
        logs = torch.log_softmax(x[chunk], dim=-1, dtype=dtype)
        at = target[chunk].unsqueeze(-1)
        loss[chunk] = -logs.gather(-1, at).squeeze(-1)
        log_z[chunk] = x[chunk].gather(-1, at).squeeze(-1).to(dtype) + loss[chunk]
    return loss, log_z


def _losses_over_ranks(logits: Tensor, real: int, target: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [n]: this rank's share of each token's probability mass, the token's loss, and log Z.

    Z and the loss are over the logits of all ranks.
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
    return own_sum / sum_exp, loss_of(x, target, shift, log_sum, axis), log_sum + shift


def loss_of(x: Tensor, target: Tensor, top: Tensor, log_sum: Tensor, axis: Axis) -> Tensor:
    """Return each token's loss [n] from log sum exp(logit - top) over all ranks; see `_losses_over_ranks`."""
    target_logit = torch.zeros_like(top)
    if x.shape[-1]:
        found = x.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).to(top.dtype)
        target_logit = torch.where(target >= 0, found - top, 0.0)
    return log_sum - total(target_logit, axis)


def on_cuda(logits: Tensor) -> bool:
    """Return whether the fused functions compute the loss of logits [n, v/t] and its gradient."""
    return logits.is_cuda


class LossState(NamedTuple):
    """Values that `gradient` needs in addition to the logits, for n tokens.

    share: [n] this rank's share of each token's probability mass, but 1 on CUDA. With the z-loss c (log Z)^2, it is
    multiplied by 1 + 2 c log Z.
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
    logits: Tensor, target: Tensor, vocab_size: int, axis: Axis, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, LossState]:
    """Compute the losses and z-losses, [n] each, and the values that `gradient` needs.

    logits: [n, v/t]. target: [n]. The z-loss is z_loss * (log Z)^2. Both losses are fp32 (fp64 for fp64 logits).
    """
    local, mine, real = on_this_rank(logits, target, vocab_size, axis)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    share = top = log_sum = torch.ones_like(target, dtype=dtype)
    elsewhere = torch.where(mine, local, -1)
    if on_cuda(logits):
        from .fused_cross_entropy import fused_losses

        loss, top, log_sum = fused_losses(logits, real, elsewhere, axis)
        log_z = top + log_sum
    elif axis.size == 1:
        loss, log_z = _losses_on_one_rank(logits[:, :real], local, dtype)
    else:
        share, loss, log_z = _losses_over_ranks(logits, real, elsewhere, axis)
    if z_loss:
        share = share * (1 + 2 * z_loss * log_z)  # the gradient of (log Z)^2 is 2 log Z times the probabilities
    return loss, z_loss * log_z**2, LossState(share, top, log_sum, local, mine, real)


def gradient(logits: Tensor, found: LossState, grad: Tensor, overwrite: bool) -> Tensor:
    """Return the gradient of the losses with respect to logits [n, v/t], in the logits' shape and dtype.

    grad: [n] incoming gradient of each token's loss, which is cross entropy plus z-loss.
    overwrite: write the result into the memory of the logits.
    """
    if on_cuda(logits):
        from .fused_cross_entropy import fused_gradient

        return fused_gradient(logits, found, grad, overwrite)
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
        of_target = -(found.mine[chunk] * grad[chunk])
        d.scatter_add_(-1, found.target[chunk].unsqueeze(-1), of_target.unsqueeze(-1))
        if not same:
            out[chunk, :real] = d
    return out


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n, v/t] that recomputes probabilities chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, z_loss: float, axis: Axis, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        loss, z, found = compute_losses(logits, target, vocab_size, axis, z_loss)
        ctx.save_for_backward(logits, *found[:-1])
        ctx.real = found.real
        ctx.overwrite = overwrite
        ctx.overwritten = False
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.overwritten:
            raise RuntimeError(
                "this loss was differentiated before, which overwrote its logits with their gradient: compute the loss "
                "again, or use mpu.vocab_parallel_cross_entropy, which leaves logits unchanged"
            )
        logits, *values = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite
        found = LossState._make([*values, ctx.real])
        return gradient(logits, found, grad, ctx.overwrite), *[None] * 5


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    axis: Axis | None = None,
) -> Tensor:
    """Return the cross entropy of each token in nats, [...] in fp32 (fp64 for fp64 logits).

    logits: [..., v/t], any float dtype, left unchanged. target: [...] ids < vocab_size.
    vocab_size: number of rows without padding; by default no row is padding.
    label_smoothing: weight of the uniform distribution over the vocabulary (Szegedy et al. 2016).
    Raises ValueError if logits and targets have different shapes, or if every rank has the logits of the whole
    vocabulary. On an accelerator, the device reports the latter.
    """
    losses, _ = vocab_parallel_losses(logits, target, vocab_size, label_smoothing, 0.0, axis)
    return losses


def vocab_parallel_losses(
    logits: Tensor,
    target: Tensor,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    axis: Axis | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and the z-loss of each token, [...] each.

    logits, target, vocab_size, label_smoothing: see `vocab_parallel_cross_entropy`.
    z_loss: the factor c of c (log Z)^2, which keeps the sum Z of exponentials near 1 (Chowdhery et al. 2022).
    The first result has the value of the cross entropy and the gradient of both losses. The second has no
    gradient.
    overwrite: let the backward pass write the gradient over the logits, which saves one of the two largest
    activations of most models. Autograd raises RuntimeError if another operation saved the logits for its own
    backward pass, and a second backward pass raises RuntimeError, too.
    """
    refuse_other_tokens(logits, target)
    axis = axis or current().model
    vocab_size = vocab_size or logits.shape[-1] * axis.size
    flat = logits.reshape(-1, logits.shape[-1])
    targets = target.reshape(-1)
    losses, z = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, targets, vocab_size, z_loss, axis, overwrite
    )
    if label_smoothing:
        from .accuracy import excess_over_mean

        losses = losses + label_smoothing * excess_over_mean(flat, targets, vocab_size, axis)
    return losses.view(target.shape), z.view(target.shape)

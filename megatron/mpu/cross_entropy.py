"""Cross entropy over a vocabulary whose logits are sharded over the model-parallel ranks.

Ranks exchange only three numbers per token: the largest logit, the sum of exponentials and the target's logit.
Logits of padding rows count as minus infinity. At any time only one chunk of the logits is held in fp32.

Shapes: ... any leading dimensions (tokens), n tokens, v/t this rank's rows of the padded vocabulary. Z is a token's
sum of exp(logit) over the vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autocast import refuse_second_derivatives
from .current import current_mesh
from .mesh import Axis
from .vocab_shards import check_same_tokens, max_over_ranks, reduce_in_place, wide_dtype

# Number of logits per chunk: 64 MiB in fp32 on accelerators, and 4 MiB on a CPU, where a chunk should fit its cache.
CHUNK = 1 << 24
CPU_CHUNK = 1 << 20
MAX_LOSS = 64.0  # log Z is accurate as the sum of a loss of at most this and the target's logit


def token_chunks(logits: Tensor, max_logits: int | None = None) -> list[slice]:
    """Cut the n tokens of logits [n, v/t] into slices of at most `max_logits` logits, by default CHUNK or CPU_CHUNK."""
    max_logits = max_logits or (CPU_CHUNK if logits.device.type == "cpu" else CHUNK)
    length = max(1, max_logits // max(1, logits.shape[-1]))  # in tokens, at least 1
    if length > 8:
        length -= length % 8  # compiled kernels would copy slices whose addresses are not multiples of 16 bytes
    return [slice(begin, begin + length) for begin in range(0, logits.shape[0], length)]


def _losses_on_one_rank(logits: Tensor, target: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return loss and log Z, [n] each, from all logits [n, v]. target: [n], 0 for a target outside the vocabulary."""
    loss = torch.empty_like(target, dtype=dtype)
    log_z = torch.empty_like(loss)
    for chunk in token_chunks(logits):
        log_probs = torch.log_softmax(logits[chunk], dim=-1, dtype=dtype)
        target_ids = target[chunk].unsqueeze(-1)
        loss[chunk] = -log_probs.gather(-1, target_ids).squeeze(-1)
        # The loss is log Z minus the target's logit.
        target_logits = logits[chunk].gather(-1, target_ids).squeeze(-1)
        log_z[chunk] = target_logits.to(dtype) + loss[chunk]
    # Where the target's logit is very low, the sum of it and the loss is inaccurate, so compute log Z from all logits.
    unlikely = (loss > MAX_LOSS).nonzero().squeeze(-1)
    log_z[unlikely] = logits[unlikely].to(dtype).logsumexp(-1)
    return loss, log_z


def _losses_over_ranks(logits: Tensor, real_rows: int, target: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [n]: this rank's share of each token's probability mass, the token's loss, and log Z.

    Z and the loss are over the logits of all ranks. logits: [n, v/t] of this rank. real_rows: number of its unpadded
    rows. target: the local row of each target, -1 if another rank holds it.
    Each rank runs torch's softmax, one fast pass over its own logits, and then rescales the result by the maximum
    and the sum over all ranks.
    """
    real_logits = logits[:, :real_rows]
    dtype = wide_dtype(real_logits)
    # These values remain if this rank holds only padding. It then contributes nothing, as exp(-inf) is 0.
    own_max = torch.full_like(target, -torch.inf, dtype=dtype)
    max_prob = torch.ones_like(own_max)  # probability of this rank's largest logit among its own logits
    if real_rows:
        own_max = real_logits.amax(dim=-1).to(dtype)
        for chunk in token_chunks(real_logits):
            max_prob[chunk] = torch.softmax(real_logits[chunk], dim=-1, dtype=dtype).amax(dim=-1)
    # A rank may hold only masked logits of a token, minus infinity. Their softmax is NaN, but they contribute nothing.
    max_prob.masked_fill_(own_max == -torch.inf, 1.0)

    max_logit = max_over_ranks(own_max, logits, axis)
    # max_prob is 1 / sum of exp(logit - own_max). So this is the rank's sum of exp(logit - max_logit).
    own_sum_exp = (own_max - max_logit).exp() / max_prob
    sum_exp = reduce_in_place(own_sum_exp.clone(), axis)
    share = own_sum_exp / sum_exp
    log_sum = sum_exp.log()
    loss = loss_from_log_sum(real_logits, target, max_logit, log_sum, axis)
    return share, loss, log_sum + max_logit


def loss_from_log_sum(logits: Tensor, target: Tensor, max_logit: Tensor, log_sum: Tensor, axis: Axis) -> Tensor:
    """Return each token's loss [n] from log sum exp(logit - max_logit) over all ranks; see `_losses_over_ranks`."""
    target_logit = torch.zeros_like(max_logit)
    if logits.shape[-1]:  # else this rank holds only padding, and no target
        # The targets of other ranks, which are -1, look up row 0 and are then replaced by 0.
        rows = target.clamp(min=0).unsqueeze(-1)
        local_logit = logits.gather(-1, rows).squeeze(-1).to(max_logit.dtype)
        target_logit = torch.where(target >= 0, local_logit - max_logit, 0.0)
    return log_sum - reduce_in_place(target_logit, axis)


def uses_fused_loss(logits: Tensor) -> bool:
    """Return whether the fused functions compute the loss of logits [n, v/t] and its gradient."""
    return logits.is_cuda


class LossState(NamedTuple):
    """Values that `logits_gradient` needs in addition to the logits, for n tokens.

    share: [n] this rank's share of each token's probability mass, but 1 on CUDA. With the z-loss c (log Z)^2, it is
    multiplied by 1 + 2 c log Z.
    max_logit, log_sum: [n] the largest logit and log sum exp(logit - largest); only CUDA uses them.
    target: [n] the target's index among this rank's vocabulary rows, 0 if another rank holds the target.
    is_local: [n] whether this rank holds the target.
    real_rows: number of this rank's rows that are not padding.
    """

    real_rows: int
    share: Tensor
    max_logit: Tensor
    log_sum: Tensor
    target: Tensor
    is_local: Tensor


def localize_targets(logits: Tensor, target: Tensor, vocab_size: int, axis: Axis) -> tuple[Tensor, Tensor, int]:
    """Return each target's local row [...], whether this rank holds it [...], and the rank's number of unpadded rows.

    A target that another rank holds gets row 0 and False. If two ranks have 8 rows each for 13 ids, the second has 5
    unpadded rows; there, target 10 gets row 2 and True.
    """
    num_rows = logits.shape[-1]
    first_row = axis.rank * num_rows
    real_rows = max(0, min(num_rows, vocab_size - first_row))
    local_ids = target - first_row
    is_local = (local_ids >= 0) & (local_ids < real_rows)
    return local_ids.masked_fill(~is_local, 0), is_local, real_rows


def compute_losses(
    logits: Tensor, target: Tensor, vocab_size: int, axis: Axis, z_loss: float = 0.0
) -> tuple[Tensor, Tensor, LossState]:
    """Compute the losses and z-losses, [n] each, and the values that `logits_gradient` needs.

    logits: [n, v/t]. target: [n]. The z-loss is z_loss * (log Z)^2. Both losses are fp32 (fp64 for fp64 logits).
    """
    local_ids, is_local, real_rows = localize_targets(logits, target, vocab_size, axis)
    dtype = wide_dtype(logits)
    share = torch.ones_like(target, dtype=dtype)  # one rank has the whole mass, and the fused functions need no share
    max_logit = share  # placeholders: only the fused functions set and read max_logit and log_sum
    log_sum = share
    own_rows = torch.where(is_local, local_ids, -1)  # -1 for targets of other ranks
    if uses_fused_loss(logits):
        from .fused_cross_entropy import fused_losses

        loss, max_logit, log_sum = fused_losses(logits, real_rows, own_rows, axis)
        log_z = max_logit + log_sum
    elif axis.size == 1:
        loss, log_z = _losses_on_one_rank(logits[:, :real_rows], local_ids, dtype)
    else:
        share, loss, log_z = _losses_over_ranks(logits, real_rows, own_rows, axis)
    # The logit of a target outside the vocabulary counts as 0, so that its loss is the same in every layout.
    loss = torch.where((target >= 0) & (target < vocab_size), loss, log_z)
    if z_loss:
        share = share * (1 + 2 * z_loss * log_z)  # the gradient of (log Z)^2 is 2 log Z times the probabilities
    return loss, z_loss * log_z**2, LossState(real_rows, share, max_logit, log_sum, local_ids, is_local)


def logits_gradient(logits: Tensor, state: LossState, grad: Tensor, overwrite: bool) -> Tensor:
    """Return the gradient of the losses with respect to logits [n, v/t], in the logits' shape and dtype.

    grad: [n] incoming gradient of each token's loss, which is cross entropy plus z-loss.
    overwrite: write the result into the memory of the logits.
    """
    real_rows = state.real_rows
    is_fused = uses_fused_loss(logits)
    if overwrite:
        result = logits
    elif is_fused:
        result = logits.clone(memory_format=torch.contiguous_format)  # the fused function reads the logits in it
    else:
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    result[:, real_rows:] = 0.0  # padding
    if not real_rows:  # this rank holds only padding
        return result
    if is_fused:
        from .fused_cross_entropy import fused_gradient

        return fused_gradient(result, state, grad)
    # Softmax can write into the result if it has the same dtype, but not over the logits that it still reads.
    writes_directly = result.dtype == grad.dtype and not overwrite
    for chunk in token_chunks(logits):
        # The gradient of a logit is grad * share * softmax over this rank's logits, minus grad if it is the target's.
        token_grad = grad[chunk]
        share = state.share[chunk]
        softmax_out = result[chunk, :real_rows] if writes_directly else None
        chunk_grad = torch.softmax(logits[chunk, :real_rows], dim=-1, dtype=grad.dtype, out=softmax_out)
        chunk_grad *= (token_grad * share).unsqueeze(-1)
        # Rows without a share may be NaN, see `_losses_over_ranks`. With a mask, torch reads all logits; with indices,
        # only these rows. But on an accelerator, the host would have to wait for the indices.
        no_share = share == 0.0
        if no_share.is_cpu:
            no_share = no_share.nonzero().squeeze(-1)
        chunk_grad[no_share] = 0.0
        target_grad = -(state.is_local[chunk] * token_grad)
        chunk_grad.scatter_add_(-1, state.target[chunk].unsqueeze(-1), target_grad.unsqueeze(-1))
        if not writes_directly:
            result[chunk, :real_rows] = chunk_grad
    return result


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n, v/t] that recomputes probabilities chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, vocab_size: int, z_loss: float, axis: Axis, overwrite: bool
    ) -> tuple[Tensor, Tensor]:
        loss, z_losses, state = compute_losses(logits, target, vocab_size, axis, z_loss)
        ctx.save_for_backward(logits, *state[1:])  # all but real_rows, which is no tensor
        ctx.real_rows = state.real_rows
        ctx.overwrite = overwrite  # whether the backward pass writes the gradient over the logits
        ctx.overwritten = False  # True after a backward pass that did so, which cannot be repeated
        ctx.mark_non_differentiable(z_losses)  # a value to log: the gradient of `loss` includes theirs
        return loss, z_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives()
        if ctx.overwritten:
            raise RuntimeError(
                "this loss was differentiated before, which overwrote its logits with their gradient: compute the loss "
                "again, or use mpu.vocab_parallel_cross_entropy, which leaves logits unchanged"
            )
        logits, *state_tensors = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite
        state = LossState(ctx.real_rows, *state_tensors)
        return logits_gradient(logits, state, grad, ctx.overwrite), *[None] * 5  # only logits have a gradient


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    axis: Axis | None = None,
) -> Tensor:
    """Return the cross entropy of each token in nats, [...] in fp32 (fp64 for fp64 logits).

    logits: [..., v/t], any float dtype, left unchanged. target: [...] ids < vocab_size. The logit of a target outside
    the vocabulary, such as -100, counts as 0: its loss is log Z in every layout. Give such tokens the weight 0.
    vocab_size: number of rows without padding; by default no row is padding.
    label_smoothing: weight of the uniform distribution over the vocabulary (Szegedy et al. 2016).
    Raises ValueError if logits and targets have different shapes, or if every rank has the logits of the whole
    vocabulary. On an accelerator, the device reports the latter.
    """
    if isinstance(vocab_size, float):
        raise TypeError(f"vocab_size, the third argument, is {vocab_size}: pass label_smoothing={vocab_size}")
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
    The first result has the value of the cross entropy and the gradient of both losses, the second has no gradient.
    overwrite: let the backward pass write the gradient over the logits, which saves one of the two largest activations
    of most models. A second backward pass raises RuntimeError, as does autograd if another operation saved the logits.
    """
    check_same_tokens(logits, target)
    axis = axis or current_mesh().model
    vocab_size = vocab_size or logits.shape[-1] * axis.size  # by default, the rows of all ranks
    flat_logits = logits.reshape(-1, logits.shape[-1])
    flat_targets = target.reshape(-1)
    losses, z_losses = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat_logits, flat_targets, vocab_size, z_loss, axis, overwrite
    )
    if label_smoothing:  # adds its factor times the excess of the target's logit over the mean logit
        from .accuracy import excess_over_mean  # accuracy.py imports this module

        losses = losses + label_smoothing * excess_over_mean(flat_logits, flat_targets, vocab_size, axis)
    return losses.view(target.shape), z_losses.view(target.shape)

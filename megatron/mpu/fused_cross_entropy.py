"""Cross entropy and its gradient in compiled functions on CUDA devices, which hold no logits in fp32.

Shapes: n tokens, v/t this rank's rows of the padded vocabulary, v of them without padding.
"""

import torch
from torch import Tensor

from megatron.fused import Fused

from .cross_entropy import LossState, loss_from_log_sum, token_chunks
from .mesh import Axis
from .vocab_shards import max_over_ranks, reduce_in_place, wide_dtype

# Number of logits per call. The limit, 1 GiB in fp32, is for functions that torch.compile leaves as they are.
FUSED_CHUNK = 1 << 28


def _max_and_log_sum(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [2, n] in `dtype` for logits [n, v]: the largest logit of each row, and log sum exp(logit - largest)."""
    logits = logits.to(dtype)
    max_logit = logits.amax(dim=-1)
    log_sum = (logits - max_logit.unsqueeze(-1)).exp().sum(dim=-1).log()
    return torch.stack([max_logit, log_sum])


def _max_and_log_sum_in_chunks(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `_max_and_log_sum`, of which a few tokens at a time have logits in `dtype`."""
    return torch.cat([_max_and_log_sum(logits[chunk], dtype) for chunk in token_chunks(logits)], 1)


max_and_log_sum = Fused(_max_and_log_sum, _max_and_log_sum_in_chunks)


def fused_losses(logits: Tensor, real_rows: int, target: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, and its largest logit and log sum exp(logit - largest) over all ranks, [n] each.

    Arguments are those of `_losses_over_ranks`.
    """
    real_logits = logits[:, :real_rows]
    dtype = wide_dtype(real_logits)
    stats = torch.zeros(2, len(target), dtype=dtype, device=real_logits.device)
    if real_rows:
        for chunk in token_chunks(real_logits, FUSED_CHUNK):
            stats[:, chunk] = max_and_log_sum(real_logits[chunk], dtype)
    max_logit, log_sum = stats
    if axis.size > 1:
        # A rank that holds only padding must not raise the maximum: its largest logit is minus infinity.
        own_max = max_logit if real_rows else max_logit - torch.inf
        max_logit = max_over_ranks(own_max, logits, axis)
        # If all logits of a token on this rank are minus infinity, its log sum is NaN. Any finite number does instead,
        # since exp(-inf + number) is 0 below.
        log_sum = log_sum.masked_fill(own_max == -torch.inf, 0.0)
        # Adding own_max - max_logit makes this rank's log sum relative to the maximum over all ranks.
        own_sum = (own_max - max_logit + log_sum).exp()
        log_sum = reduce_in_place(own_sum, axis).log()
    return loss_from_log_sum(real_logits, target, max_logit, log_sum, axis), max_logit, log_sum


def _write_gradient(
    logits: Tensor, max_logit: Tensor, log_sum: Tensor, target: Tensor, factor: Tensor, target_grad: Tensor
) -> Tensor:
    """Overwrite logits [n, v] with factor * exp(logits - max_logit - log_sum), plus target_grad at targets.

    All other arguments are [n].
    """
    log_probs = logits.to(factor.dtype) - max_logit.unsqueeze(-1) - log_sum.unsqueeze(-1)
    gradient = log_probs.exp() * factor.unsqueeze(-1)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    is_target = token_ids == target.unsqueeze(-1)
    gradient_at_target = gradient + target_grad.unsqueeze(-1)
    return logits.copy_(torch.where(is_target, gradient_at_target, gradient))


def _write_in_chunks(logits: Tensor, *token_values: Tensor) -> Tensor:
    """Do what `_write_gradient` does, a few tokens at a time, so that its temporary tensors are small."""
    for chunk in token_chunks(logits):
        _write_gradient(logits[chunk], *(values[chunk] for values in token_values))
    return logits


write_gradient = Fused(_write_gradient, _write_in_chunks)


def fused_gradient(logits: Tensor, state: LossState, grad: Tensor) -> Tensor:
    """Overwrite logits [n, v/t] with the gradient of the losses, and return it; see `cross_entropy.logits_gradient`.

    The columns of padding stay as they are.
    """
    # The gradient is `grad * share` times the probabilities, minus `grad` at the target.
    token_values = (
        state.max_logit,
        state.log_sum,
        state.target,
        grad * state.share,
        -(state.is_local * grad),
    )
    for chunk in token_chunks(logits, FUSED_CHUNK):
        write_gradient(logits[chunk, : state.real_rows], *(values[chunk] for values in token_values))
    return logits

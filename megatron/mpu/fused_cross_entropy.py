"""Cross entropy and its gradient in compiled functions on CUDA devices, which hold no logits in fp32.

Shapes: n tokens, v/t this rank's rows of the padded vocabulary, v of them without padding.
"""

import torch
from torch import Tensor

from megatron.fused import Fused

from .cross_entropy import LossState, chunks_of, loss_of
from .mesh import Axis
from .vocab_shards import largest, total

# Number of logits per call. The limit, 1 GiB in fp32, is for functions that torch.compile leaves as they are.
FUSED_CHUNK = 1 << 28


def _top_and_log_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [2, n] in `dtype` for logits x [n, v]: the largest logit of each row, and log sum exp(logit - largest)."""
    x = x.to(dtype)
    top = x.amax(dim=-1)
    return torch.stack([top, (x - top.unsqueeze(-1)).exp().sum(dim=-1).log()])


top_and_log_sum = Fused(
    _top_and_log_sum, lambda x, dtype: torch.cat([_top_and_log_sum(x[chunk], dtype) for chunk in chunks_of(x)], 1)
)


def fused_losses(logits: Tensor, real: int, target: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, and its largest logit and log sum exp(logit - largest) over all ranks, [n] each.

    Arguments are those of `_losses_over_ranks`.
    """
    x = logits[:, :real]
    dtype = torch.promote_types(x.dtype, torch.float32)
    both = torch.zeros(2, len(target), dtype=dtype, device=x.device)
    if real:
        for chunk in chunks_of(x, FUSED_CHUNK):
            both[:, chunk] = top_and_log_sum(x[chunk], dtype)
    top, log_sum = both
    if axis.size > 1:
        own = top if real else top - torch.inf
        top = largest(own, logits, axis)
        log_sum = total((own - top + log_sum).exp(), axis).log()
    return loss_of(x, target, top, log_sum, axis), top, log_sum


def _write_gradient(
    x: Tensor, top: Tensor, log_sum: Tensor, target: Tensor, factor: Tensor, of_target: Tensor
) -> Tensor:
    """Overwrite logits x [n, v] with factor * exp(x - top - log_sum), plus of_target at targets.

    All other arguments are [n].
    """
    shifted = x.to(factor.dtype) - top.unsqueeze(-1) - log_sum.unsqueeze(-1)
    d = shifted.exp() * factor.unsqueeze(-1)
    is_target = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    return x.copy_(torch.where(is_target, d + of_target.unsqueeze(-1), d))


def _write_in_chunks(x: Tensor, *of_tokens: Tensor) -> Tensor:
    for chunk in chunks_of(x):
        _write_gradient(x[chunk], *(values[chunk] for values in of_tokens))
    return x


write_gradient = Fused(_write_gradient, _write_in_chunks)


def fused_gradient(logits: Tensor, found: LossState, grad: Tensor, overwrite: bool) -> Tensor:
    """Return the gradient of the losses with respect to logits [n, v/t]; see `cross_entropy.gradient`."""
    real = found.real
    out = logits if overwrite else logits.clone(memory_format=torch.contiguous_format)
    out[:, real:] = 0.0
    if not real:
        return out
    of_tokens = (found.top, found.log_sum, found.target, grad * found.share, -(found.mine * grad))
    for chunk in chunks_of(out, FUSED_CHUNK):
        write_gradient(out[chunk, :real], *(values[chunk] for values in of_tokens))
    return out

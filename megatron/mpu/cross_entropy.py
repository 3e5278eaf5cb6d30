"""Cross entropy over a vocabulary whose logits are sharded over the model-parallel ranks.

Ranks exchange only three numbers per token: the largest logit, the sum of exponentials and the target's logit. No
logit matrix is communicated. Logits of padding rows count as minus infinity. At any time only one chunk of the
logits is held in fp32.

Shapes: ... any leading dimensions (tokens), n tokens, v/t this rank's rows of the padded vocabulary. Z is a token's
sum of exp(logit) over the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from .current import current
from .mesh import Axis
from .token_losses import LossState, compute_losses, gradient
from .vocab_shards import refuse_other_tokens


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits [n, v/t] that recomputes probabilities chunk by chunk in the backward pass."""

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
        loss, z, found = compute_losses(logits, target, vocab_size, axis, label_smoothing, z_loss)
        ctx.save_for_backward(logits, *found[:-1])
        ctx.label_smoothing = label_smoothing
        ctx.smoothed = label_smoothing / vocab_size
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
        logits, share, top, log_sum, local, mine = ctx.saved_tensors
        found = LossState(share, top, log_sum, local, mine, ctx.real)
        ctx.overwritten = ctx.overwrite
        of_logits = gradient(logits, found, grad, ctx.smoothed, ctx.label_smoothing, ctx.overwrite)
        return of_logits, *[None] * 6


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

    logits: [..., v/t]. target: [...] ids < vocab_size. vocab_size: number of rows without padding; by default no
    row is padding. label_smoothing: weight of the uniform distribution over the vocabulary.
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
        flat, targets, vocab_size, label_smoothing, z_loss, axis, overwrite
    )
    return losses.view(target.shape), z.view(target.shape)

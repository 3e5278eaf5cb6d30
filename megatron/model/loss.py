"""The loss of a language model: summed over target tokens, so that it can be averaged over a whole global batch.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron import mpu
from megatron.config import Config

IsText = Callable[[Tensor], Tensor]
Logits = Tensor | mpu.DeferredLogits
Targets = tuple[Tensor, Tensor]  # labels and loss mask, both [b, s]


def count_targets(targets: Targets) -> Tensor:
    """How many targets a micro-batch has, a scalar in fp64: exact for any batch."""
    return targets[1].sum(dtype=torch.float64)


class TokenLoss:
    """Sum over the target tokens of a micro-batch; the engine divides by the count over the global batch.

    A mean per micro-batch would weigh every micro-batch the same whatever its number of
    targets, and the loss would depend on how the global batch is cut.

    is_text: labels -> which of them are text, and not marks between it; their loss is looked at apart in evaluation.
    z_loss: c of c (log Z)^2 for each target, which is learned from besides (Chowdhery et al. 2022). The sum is the cross entropy, its
    gradient is that of both; without gradients there is no z-loss.
    consumes_logits: the backward pass leaves their gradient in the memory of the logits, see `mpu.vocab_parallel_losses`.
    """

    def __init__(
        self,
        vocab_size: int,
        fused: bool = True,
        is_text: IsText | None = None,
        z_loss: float = 0.0,
        consumes_logits: bool = False,
    ) -> None:
        self.vocab_size, self.fused, self.is_text, self.z_loss = vocab_size, fused, is_text, z_loss
        self.consumes_logits = consumes_logits
        self.axis = mpu.get_mesh().model
        # Of the last micro-batch: sums over its text without gradients, the z-loss of its targets with them.
        self.aside: dict[str, Tensor] = {}

    @classmethod
    def by(cls, config: Config, vocab_size: int, is_text: IsText | None = None) -> "TokenLoss":
        """As the settings say, for a model whose logits nobody else sees."""
        fused = "cross-entropy" not in config.model.unfused
        return cls(vocab_size, fused, is_text, config.train.z_loss, consumes_logits=True)

    def of_labels(self, logits: Logits, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """The loss of every token, as `per_token` gives it, or with a loss mask [b, s] their sum."""
        return self.per_token(logits, labels) if loss_mask is None else self(logits, (labels, loss_mask))

    def per_token(self, logits: Logits, labels: Tensor) -> Tensor:
        """logits [s, b, v/t], labels [b, s] -> loss [b, s] in nats, fp32 (fp64 for fp64 logits).

        Logits that were put off are computed in chunks where no gradient is wanted. With one, whose factor may be another for each
        token, they are computed all at once.
        """
        if isinstance(logits, mpu.DeferredLogits) and not torch.is_grad_enabled():
            across = labels.t()
            tokens = across.reshape(1, -1)
            found = [self._seen(chunk.unsqueeze(1), tokens[:, rows]) for rows, chunk in logits.chunks()]
            self.aside = {name: torch.stack([aside[name] for _, aside in found]).sum() for name in found[0][1]}
            return torch.cat([losses for losses, _ in found], dim=1).view(across.shape).t()
        losses, self.aside = self._seen(mpu.whole_logits(logits), labels)
        return losses

    def _seen(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of every token, and what is looked at apart."""
        losses, _ = self._both(logits, labels)
        looks = self.is_text is not None and not torch.is_grad_enabled()
        return losses, self._of_text(logits, labels, losses) if looks else {}

    def _both(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """logits [s, b, v/t], labels [b, s] -> the loss and the z-loss of every token, [b, s] each; the first has the gradient of both."""
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        if not self.fused:
            return self._gathered(logits, labels, z_loss)
        across = labels.t().contiguous()
        losses, z = mpu.vocab_parallel_losses(
            logits, across, self.vocab_size, z_loss=z_loss, axis=self.axis, overwrite=self.consumes_logits
        )
        return losses.t(), z.t()

    def _of_text(self, logits: Tensor, labels: Tensor, losses: Tensor) -> dict[str, Tensor]:
        assert self.is_text is not None
        text = self.is_text(labels)
        right = mpu.vocab_parallel_right(logits, labels.t(), self.vocab_size, axis=self.axis).t()
        found = {"text_loss": losses * text, "text_right": right & text, "text_tokens": text}
        return {name: each.sum(dtype=torch.float64) for name, each in found.items()}

    def _gathered(self, logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        """By torch, from a copy of all logits on every rank."""
        whole = mpu.gather_from_model_parallel_region(logits, self.axis)[..., : self.vocab_size]
        wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
        losses = F.cross_entropy(wide.permute(1, 2, 0), labels, reduction="none")
        z = z_loss * wide.logsumexp(-1).t() ** 2 if z_loss else torch.zeros_like(losses)
        return losses + (z - z.detach()) if z_loss else losses, z.detach()

    def __call__(self, logits: Logits, targets: Targets) -> Tensor:
        """logits [s, b, v/t], targets (labels [b, s], loss mask [b, s]) -> the sum, a scalar."""
        labels, loss_mask = targets
        if not torch.is_grad_enabled():
            return (self.per_token(logits, labels) * loss_mask).sum()
        if isinstance(logits, mpu.DeferredLogits):
            total, z = logits.summed_loss(labels.t(), loss_mask.t(), self.vocab_size, self.z_loss)
        else:
            total, z = ((each * loss_mask).sum() for each in self._both(logits, labels))
        self.aside = {"z_loss": z} if self.z_loss else {}
        return total

    def count_targets(self, targets: Targets) -> Tensor:
        """A scalar, what the engine divides by: see `count_targets` above."""
        return count_targets(targets)

"""Loss of a language model: summed over target tokens, so that it can be averaged over a whole global batch.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, Union

import torch
from torch import Tensor

from megatron import mpu
from megatron.config import Config

IsText = Callable[[Tensor], Tensor]
Logits = Union[Tensor, "mpu.DeferredLogits"]
# Labels and loss mask, both [b, s], and perhaps a dict of further tensors:
# - `corpora`: float [b, c], 1 at the corpus of each sample and else 0;
# - `text`: fp64 [n], the number of text tokens of the micro-batch in each of the model's n stacks of layers, divided by
#   the number of context-parallel ranks.
Targets = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Mapping[str, Tensor]]


def split_router_loss(outputs: Any) -> tuple[Logits, Tensor | None]:
    """Separate what a model returns: its logits [s, b, v/t], and in training the loss [n] of its routers, if any."""
    return outputs if isinstance(outputs, tuple) else (outputs, None)


def targets_of(labels: Tensor, loss_mask: Tensor, extra: Mapping[str, Tensor] | None = None) -> Targets:
    """Return `Targets` of labels and loss mask, both [b, s], without the dict of other tensors if it is empty."""
    return (labels, loss_mask, extra) if extra else (labels, loss_mask)


def extra_targets(targets: Targets) -> Mapping[str, Tensor]:
    """Return the dict of further tensors of `Targets`, such as `corpora` [b, c]; empty if there is none."""
    return targets[2] if len(targets) > 2 else {}


def count_targets(targets: Targets) -> Tensor:
    """Return the number of targets of a micro-batch, a scalar in fp64, exact for any batch.

    If the targets contain numbers of text tokens [n], return a vector [1 + n] that begins with the targets.
    """
    num_targets = targets[1].sum(dtype=torch.float64)  # the loss mask is 1 at targets, else 0
    extra = extra_targets(targets)
    if "text" not in extra:
        return num_targets
    return torch.cat([num_targets.view(1), extra["text"]])


class TokenLoss:
    """Loss summed over a micro-batch's target tokens; the engine divides it by the global batch's number of targets.

    With means per micro-batch, the loss would depend on how the global batch is split into micro-batches.
    is_text: maps labels to a mask that is True for text and False for special tokens. Evaluation reports the loss of
    text separately.
    z_loss: the factor c of the z-loss c (log Z)^2 of a target, where Z is the sum of the exponentials of its logits
    (Chowdhery et al. 2022). The returned sum has the value of the cross entropy, but the gradient of cross entropy plus
    z-loss. Without gradients no z-loss is computed.
    consumes_logits: the backward pass overwrites the logits with their gradient, see `mpu.vocab_parallel_losses`.
    """

    def __init__(
        self,
        vocab_size: int,
        fused: bool = True,
        is_text: IsText | None = None,
        z_loss: float = 0.0,
        consumes_logits: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.fused = fused
        self.is_text = is_text
        self.z_loss = z_loss
        self.consumes_logits = consumes_logits
        self.axis = mpu.get_mesh().model
        # Mean over the micro-batches of this step of `count_targets`, which the engine sets, or a function that waits
        # for it. Without an engine, the micro-batch's own number is used. See `scale_router_loss`.
        self.mean_targets: Tensor | Callable[[], Tensor] | None = None
        # Values of the last micro-batch. Evaluation: sums over text. Training: the summed z-loss.
        self.aux: dict[str, Tensor] = {}
        # If this is a list, evaluation appends each sample's summed loss and number of wrong predictions as [2, b].
        self.sample_sums: list[Tensor] | None = None

    @classmethod
    def from_config(cls, config: Config, vocab_size: int, is_text: IsText | None = None) -> "TokenLoss":
        """Build the loss that the settings define; its backward pass overwrites the logits."""
        fused = "cross-entropy" not in config.model.reference_ops
        return cls(vocab_size, fused, is_text, config.train.z_loss, consumes_logits=True)

    count_targets = staticmethod(count_targets)  # the engine divides by its result
    accepts_callable = True  # whether `mean_targets` may be a function

    def token_losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's cross entropy and z-loss, [b, s] each.

        The cross entropy has the gradient of their sum, the z-loss has none. logits: [s, b, v/t]. labels: [b, s].
        """
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0  # without gradients it has no use
        if not self.fused:
            from .extra_losses import reference_losses

            return reference_losses(logits, labels, self.vocab_size, self.axis, z_loss)
        labels_sb = labels.t().contiguous()  # [s, b], as in the logits
        losses, z_losses = mpu.vocab_parallel_losses(
            logits, labels_sb, self.vocab_size, z_loss=z_loss, axis=self.axis, overwrite=self.consumes_logits
        )
        return losses.t(), z_losses.t()

    def __call__(self, logits: Any, targets: Targets) -> Tensor:
        """Return the loss summed over targets, a scalar.

        logits: [s, b, v/t], in training with the loss of the routers, see `split_router_loss`. Like the z-loss, this
        loss has a gradient but is not shown in the sum.
        targets: (labels [b, s], loss mask [b, s]), perhaps with a dict, see `Targets`.
        """
        labels, loss_mask = targets[:2]
        logits, router_loss = split_router_loss(logits)
        total, losses = self._sum_losses(logits, labels, loss_mask)
        if router_loss is not None:
            from .extra_losses import scale_router_loss

            router_loss = scale_router_loss(router_loss, count_targets(targets), self.mean_targets)
            total = total + (router_loss - router_loss.detach())  # adds a gradient, but no value
            self.aux = self.aux | {"router_loss": router_loss.detach()}
        extra = extra_targets(targets)
        if "corpora" in extra:
            from .extra_losses import sum_by_corpus

            self.aux = self.aux | sum_by_corpus(losses.detach(), loss_mask, extra["corpora"])
        return total

    def _sum_losses(self, logits: Logits, labels: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summed loss, a scalar, and the loss of each target, [b, s], 0 for other tokens; set `aux`."""
        if not torch.is_grad_enabled():
            from .extra_losses import evaluate_targets

            return evaluate_targets(self, logits, labels, loss_mask)
        if isinstance(logits, Tensor):
            losses, z_losses = self.token_losses(logits, labels)
            losses = losses * loss_mask
            total = losses.sum()
            z_sum = (z_losses * loss_mask).sum()
        else:  # DeferredLogits, whose output matmul runs together with the loss
            total, z_sum, losses = logits.summed_loss(labels.t(), loss_mask.t(), self.vocab_size, self.z_loss)
            losses = losses.t()
        self.aux = {"z_loss": z_sum} if self.z_loss else {}
        return total, losses

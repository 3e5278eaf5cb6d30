"""The loss of a language model: summed over target tokens, so that it can be averaged over a whole global batch.

Shapes: s sequence, b batch, v vocabulary, t model-parallel ranks.
"""

import torch
from torch import Tensor

from megatron import mpu


class TokenLoss:
    """Sum over the target tokens of a micro-batch; the engine divides by the count over the global batch.

    A mean per micro-batch would weigh every micro-batch the same whatever its number of
    targets, and the loss would depend on how the global batch is cut.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.axis = mpu.get_mesh().model

    def per_token(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [s, b, v/t], labels [b, s] -> loss [b, s] in nats, fp32 (fp64 for fp64 logits)."""
        losses = mpu.vocab_parallel_cross_entropy(logits, labels.t().contiguous(), self.vocab_size, axis=self.axis)
        return losses.t()

    def __call__(self, logits: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """logits [s, b, v/t], targets (labels [b, s], loss mask [b, s]) -> the sum, a scalar."""
        labels, loss_mask = targets
        return (self.per_token(logits, labels) * loss_mask).sum()

    def count_targets(self, targets: tuple[Tensor, Tensor]) -> Tensor:
        """How many targets a micro-batch has, in fp64: exact for any batch."""
        return targets[1].sum(dtype=torch.float64)

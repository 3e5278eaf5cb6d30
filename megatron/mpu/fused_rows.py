"""Order of the rows of a weight that fuses several matrices."""

from typing import NamedTuple

import torch
from torch import Tensor


class FusedRows(NamedTuple):
    """Order of the rows of a weight that fuses several matrices, such as query, key and value.

    The rows repeat this pattern: first `parts[0]` blocks of `width` rows of matrix 0, then `parts[1]` blocks of matrix
    1, and so on.
    growth: for each matrix, its inputs and outputs divided by those in muP's base model; empty if all are equal.
    """

    parts: tuple[int, ...]
    width: int
    growth: tuple[tuple[float, float], ...] = ()

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """View a whole weight [g * sum(parts) * width, i] as its matrices, [g, part, width, i] each."""
        return torch.split(whole.view(-1, sum(self.parts), self.width, whole.shape[1]), list(self.parts), 1)

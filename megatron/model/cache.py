"""Keys and values of earlier tokens, which text generation keeps.

Shapes: b batch, g key-value heads of a rank, q new tokens, k cached tokens, d width of a head.
"""

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of earlier tokens, for one attention layer, [b, g, k, d] each."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    @property
    def length(self) -> int:
        """Number k of cached tokens."""
        return 0 if self.key is None else self.key.shape[2]

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, [b, g, q, d] each; return all cached keys and values."""
        if self.key is not None and self.value is not None:
            key = torch.cat([self.key, key], dim=2)
            value = torch.cat([self.value, value], dim=2)
        self.key = key
        self.value = value
        return key, value

    def reorder(self, rows: Tensor) -> None:
        """Replace row i of the batch by row rows[i], for beam search; rows: [b]."""
        if self.key is not None and self.value is not None:
            self.key = self.key[rows]
            self.value = self.value[rows]


class Caches:
    """Key-value caches of one layer for incremental decoding."""

    def __init__(self) -> None:
        self.own = KeyValueCache()
        self.cross = KeyValueCache()

    def before(self, context_ranks: int) -> int:
        """Return the number of cached tokens. Raises ValueError if there are several context-parallel ranks."""
        if context_ranks > 1:
            raise ValueError(
                "text generation does not support context parallelism: "
                "build the model with a context-parallel size of 1"
            )
        return self.own.length

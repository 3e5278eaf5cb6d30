"""Keys and values of earlier tokens, which text generation keeps.

Shapes: b batch, g key-value heads of a rank, q new tokens, k cached tokens, d width of a head.
"""

from torch import Tensor


class KeyValueCache:
    """Keys and values of earlier tokens, for one attention layer, [b, g, k, d] each.

    The memory has room for more tokens, so that most new tokens are appended without copying the old ones.
    """

    memory: Tensor | None = None  # [2, b, g, room, d]
    length = 0  # number k of cached tokens

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, [b, g, q, d] each; return all cached keys and values."""
        begin = self.length
        self.length += key.shape[2]
        memory = self._ensure_room(key)
        memory[0, :, :, begin : self.length] = key
        memory[1, :, :, begin : self.length] = value
        return self.get_all()

    def _ensure_room(self, key: Tensor) -> Tensor:
        """Return the memory with room for `length` tokens; if it grows, it grows to twice as many."""
        memory = self.memory
        if memory is not None and memory.shape[3] >= self.length:
            return memory
        b, g, _, d = key.shape
        larger = key.new_empty(2, b, g, 2 * self.length, d)
        if memory is not None:
            larger[:, :, :, : memory.shape[3]] = memory
        self.memory = larger
        return larger

    def get_all(self) -> tuple[Tensor, Tensor]:
        """Return all cached keys and values, [b, g, k, d] each."""
        assert self.memory is not None
        return self.memory[0, :, :, : self.length], self.memory[1, :, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Replace row i of the batch by row rows[i], for beam search; rows: [b]."""
        if self.memory is not None:
            self.memory = self.memory[:, rows]


class Caches:
    """Key-value caches of one layer for incremental decoding."""

    def __init__(self) -> None:
        self.self_attention = KeyValueCache()
        self.cross_attention = KeyValueCache()

    def cached_length(self, context_ranks: int) -> int:
        """Return the number of cached tokens. Raises ValueError if there are several context-parallel ranks."""
        if context_ranks > 1:
            raise ValueError(
                "text generation does not support context parallelism: "
                "build the model with a context-parallel size of 1"
            )
        return self.self_attention.length

"""Cross-attention, from the decoder of a T5 to its encoder.

Shapes: q query tokens, k key tokens, b batch, h hidden.
"""

from typing import NamedTuple

from torch import Tensor

from megatron import mpu
from megatron.config import ModelConfig

from .attention import Attention, split_heads
from .cache import KeyValueCache
from .masks import Documents


class Encoded(NamedTuple):
    """Encoder output [k, b, h] to which a decoder layer attends, and the documents that restrict this attention."""

    states: Tensor
    mask: Documents | None


class CrossAttention(Attention):
    """Cross-attention from decoder to encoder.

    The rows of `key_value` are key and value of head 0, then key and value of head 1, and so on.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__(config, f"{name}.cross_attention", output_std, causal=False)
        heads = config.num_attention_heads
        self.query = self._new_projection(config, config.query_factor, heads=heads, bias=config.hidden_bias)
        self.key_value = self._new_projection(config, 1.0, 1.0, heads=heads, bias=config.hidden_bias)
        mpu.spec_of(self.key_value.weight).fused = mpu.FusedRows((1, 1), self.head_size)

    def forward(
        self, hidden: Tensor, encoded: Tensor, mask: Documents | None, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Apply cross-attention: (hidden [q, b, h], encoded [k, b, h]) -> ([q, b, h], bias).

        The caller must add the bias. cache: keys and values of the encoder's output, which the first call fills.
        """
        projected, _ = self.query(hidden)
        query = self.view_queries(projected)
        if cache is not None and cache.length:  # the first call has filled the cache
            key, value = cache.get_all()
        else:
            key_and_value, _ = self.key_value(encoded)
            key, value = split_heads(key_and_value, self.head_size, num_parts=2)
            if cache is not None:
                cache.extend(key, value)
        context = self.attend(query, key, value, mask, None)
        return self.dense(context)  # type: ignore[no-any-return]

    def view_queries(self, projected: Tensor) -> Tensor:
        """View [q, b, n/t * d] as [b, n/t, q, d]."""
        return projected.view(*projected.shape[:2], self.heads, self.head_size).permute(1, 2, 0, 3)


def build_cross_attention(config: ModelConfig, name: str, output_std: float) -> CrossAttention:
    """Return the cross-attention of a layer."""
    if {"norm", "qkv"} & set(config.recompute_modules):
        from .recomputed_attention import RecomputedCrossAttention

        return RecomputedCrossAttention(config, name, output_std)
    return CrossAttention(config, name, output_std)

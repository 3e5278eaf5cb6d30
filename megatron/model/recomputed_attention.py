"""Attention whose queries, keys and values are recomputed in the backward pass (--recompute-modules qkv).

Shapes: s or q query tokens, k key tokens, b batch, h hidden.
"""

import functools
from typing import Any

from torch import Tensor

from megatron import mpu
from megatron.config import ModelConfig

from .attention import SelfAttention, split_heads
from .attention_kernels import Mask
from .cache import KeyValueCache
from .cross_attention import CrossAttention
from .masks import Documents
from .recompute import Recipe, save_recipe_for
from .rotary import Rotation


def _projected(
    projection: mpu.ColumnParallelLinear, x: Tensor, recipe: Recipe | None, again: bool
) -> tuple[Tensor, Recipe | None]:
    """Return `projection(x)` for x [s, b, h], and the recipe to recompute it; None for the latter unless `again`.

    recipe: how to recompute x; None if autograd saves x.
    """
    out, _ = projection(x)
    return out, Recipe(lambda given: projection(given)[0], recipe or x) if again else None


@functools.cache
def recomputed_self_attention(kind: type[SelfAttention]) -> type[SelfAttention]:
    """Return the class `kind` with a forward pass that saves recipes."""

    class Recomputed(kind):  # type: ignore[valid-type,misc]
        def __init__(self, config: ModelConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.qkv_again = "qkv" in config.recompute_modules

        def forward(
            self,
            hidden: Tensor,
            mask: Mask,
            bias: Tensor | None = None,
            cache: KeyValueCache | None = None,
            angles: Rotation | None = None,
            recipe: Recipe | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            """Apply self-attention to [s, b, h]. recipe: how to recompute `hidden`; None if it is saved."""
            qkv, again = _projected(self.query_key_value, hidden, recipe, self.qkv_again)
            with save_recipe_for((again, qkv)):
                query, key, value = self.split(qkv, angles)
            shares_buffer = query.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()
            # Grouped heads share one buffer, so the recipe to recompute query's buffer recomputes all three.
            if again is not None and shares_buffer:
                again = Recipe(lambda given: self.split(given, angles)[0], again)
                qkv = query
            if cache is not None:
                key, value = cache.extend(key, value)
            with save_recipe_for((again, qkv)):
                context = self.attend(query, key, value, mask, bias)
            return self.dense(context)  # type: ignore[no-any-return]

    Recomputed.__name__ = f"Recomputed{kind.__name__}"
    return Recomputed


class RecomputedCrossAttention(CrossAttention):
    """Cross-attention whose queries, keys and values are recomputed."""

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__(config, name, output_std)
        self.qkv_again = "qkv" in config.recompute_modules

    def forward(
        self,
        hidden: Tensor,
        encoded: Tensor,
        mask: Documents | None,
        cache: KeyValueCache | None = None,
        recipe: Recipe | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply cross-attention to [q, b, h]. recipe: how to recompute `hidden`; None if it is saved."""
        if cache is not None:  # text generation has no backward pass
            return super().forward(hidden, encoded, mask, cache)
        projected, again = _projected(self.query, hidden, recipe, self.qkv_again)
        both, both_again = _projected(self.key_value, encoded, None, self.qkv_again)
        key, value = split_heads(both, self.head_size, 2)
        with save_recipe_for((again, projected), (both_again, both)):
            context = self.attend(self.queries(projected), key, value, mask, None)
        return self.dense(context)  # type: ignore[no-any-return]

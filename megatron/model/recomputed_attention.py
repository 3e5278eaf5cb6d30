"""Attention whose queries, keys and values are recomputed in the backward pass (--recompute-modules qkv).

Shapes: s or q query tokens, k key tokens, b batch, h hidden.
"""

import functools

from torch import Tensor

from megatron import mpu

from .attention import SelfAttention, split_heads
from .attention_kernels import Mask
from .cache import KeyValueCache
from .cross_attention import CrossAttention
from .masks import Documents
from .recompute import Recipe, save_recipe_for
from .rotary import Rotation


def _project(
    projection: mpu.ColumnParallelLinear, x: Tensor, recipe: Recipe | None, needs_recipe: bool
) -> tuple[Tensor, Recipe | None]:
    """Return `projection(x)` for x [s, b, h], and the recipe to recompute it, which is None unless `needs_recipe`.

    recipe: how to recompute x; None if autograd saves x.
    """
    out, _ = projection(x)  # the bias, if any, is already added
    if not needs_recipe:
        return out, None
    # Without `recipe`, autograd saves x. With it, the backward pass first recomputes x, then the projection of x.
    return out, Recipe(lambda source: projection(source)[0], recipe or x)


@functools.cache
def recomputed_self_attention(attention_class: type[SelfAttention]) -> type[SelfAttention]:
    """Return the class `attention_class` with a forward pass that saves recipes."""

    class Recomputed(attention_class):  # type: ignore[valid-type,misc]
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
            # buffer: the memory that query, key and value share, and that the backward pass recomputes as a whole.
            buffer, buffer_recipe = _project(self.query_key_value, hidden, recipe, self.recomputes_qkv)
            with save_recipe_for((buffer_recipe, buffer)):
                query, key, value = self.split_qkv(buffer, angles)
            is_copied = query.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
            # Plain heads are views of the projection. Grouped heads are copied from it to one new buffer: the recipe of
            # the query's memory recomputes this buffer, and with it all three.
            if buffer_recipe is not None and is_copied:
                buffer_recipe = Recipe(lambda source: self.split_qkv(source, angles)[0], buffer_recipe)
                buffer = query
            if cache is not None:
                key, value = cache.extend(key, value)
            with save_recipe_for((buffer_recipe, buffer)):
                context = self.attend(query, key, value, mask, bias)
            return self.dense(context)  # type: ignore[no-any-return]

    Recomputed.__name__ = f"Recomputed{attention_class.__name__}"
    return Recomputed


class RecomputedCrossAttention(CrossAttention):
    """Cross-attention whose queries, keys and values are recomputed."""

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
        projected, query_recipe = _project(self.query, hidden, recipe, self.recomputes_qkv)
        key_and_value, key_value_recipe = _project(self.key_value, encoded, None, self.recomputes_qkv)
        key, value = split_heads(key_and_value, self.head_size, num_parts=2)
        with save_recipe_for((query_recipe, projected), (key_value_recipe, key_and_value)):
            context = self.attend(self.view_queries(projected), key, value, mask, None)
        return self.dense(context)  # type: ignore[no-any-return]

"""Multi-head attention with its heads sharded over the model-parallel ranks.

Shapes: s or q query tokens, k key tokens, b batch, h hidden, n heads, d width of a head, t model-parallel ranks,
g key-value heads of a rank: n/t, or fewer if each is shared by a group of query heads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .attention_kernels import Call, Mask, attend
from .grouped_heads import by_head, own_queries, split_heads
from .masks import Documents
from .norm import build_head_norm
from .recompute import Recipe, save_recipe_for
from .rotary import Rotation


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
            self.key, self.value = self.key[rows], self.value[rows]


def _fill_heads(std: float, head_size: int, factors: Sequence[float], weight: Tensor) -> None:
    """Draw normal values, and scale the rows of part i (query, key or value) of each head by factors[i]."""
    nn.init.normal_(weight, 0.0, std)
    weight.view(-1, len(factors), head_size, weight.shape[1]).mul_(torch.tensor(factors).view(1, -1, 1, 1))


class Attention(nn.Module):
    """Common part of self- and cross-attention (Vaswani et al. 2017): softmax(q k^T + bias) v, output projection.

    watch: function that is called with each attention call before it is computed, or None.
    """

    watch: Callable[[Call], None] | None = None

    def __init__(self, config: ModelConfig, stream: str, output_std: float, causal: bool) -> None:
        super().__init__()
        self.axis = mpu.get_mesh().model
        self.heads = config.num_attention_heads // self.axis.size
        self.groups = max(config.key_value_heads // self.axis.size, 1)
        self.head_size = config.head_size
        self.inner = config.num_attention_heads * config.head_size
        self.dropout, self.rng = config.attention_dropout, mpu.get_rng()
        self.stream = mpu.Stream(self.rng, stream, split=True)
        self.qkv_again = "qkv" in config.recompute_modules
        self.recompute = config.checkpoint_attention
        self.call: Callable[..., Call] = partial(
            Call,
            causal=causal,
            scale=config.attention_scale,
            stream=self.stream,
            by_document="document-attention" not in config.reference_ops,
            fused_bias="biased-attention" not in config.reference_ops,
            packs=not self.qkv_again,
        )
        self.dense = mpu.RowParallelLinear(
            self.inner,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=mpu.normal(output_std),
        )

    def _project(
        self, config: ModelConfig, *factors: float, heads: int | None = None, bias: bool | None = None
    ) -> mpu.ColumnParallelLinear:
        """Build the projection h -> len(factors) x n x d, with its rows ordered by head, so each rank gets whole heads.

        factors: for each projected part (query, key or value), the factor of its initial weights. heads: n, by
        default the number of attention heads. bias: whether to add a bias, by default the value of --hidden-bias.
        """
        return mpu.ColumnParallelLinear(
            config.hidden_size,
            len(factors) * (heads or config.num_attention_heads) * self.head_size,
            bias=config.hidden_bias if bias is None else bias,
            gather_output=False,
            init_method=partial(_fill_heads, config.hidden_std, self.head_size, factors),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """Compute attention: query [b, n/t, q, d], key, value [b, g, k, d] -> [q, b, n/t * d].

        mask: `Documents` if tokens may attend only within their document; or a bool mask [1 or b, 1, q, k], True where
        a query may attend; or None. With context parallelism, `key` and `value` hold this rank's tokens only, but the
        mask covers the keys of all ranks.
        bias: [1, n/t, q, k], added to the scores, or None.
        """
        p = self.dropout if self.training else 0.0
        call = self._with_dropout if p and query.device.type != "cpu" else partial(self._attend, p=p)
        if self.recompute and self.training:
            call = partial(self._computed_again, call)
        context: Tensor = call(query, key, value, mask, bias)
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, *inputs: Any, p: float) -> Tensor:
        call = self.call(*inputs, p)
        if self.watch is not None:
            self.watch(call)
        return attend(call)

    def _computed_again(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return mpu.checkpoint(call, *inputs, rng=self.rng)  # type: ignore[no-any-return]

    def _with_dropout(self, *inputs: Any) -> Tensor:
        with self.rng.fork(self.stream.name, inputs[0].device, self.stream.split):
            return self._attend(*inputs, p=self.dropout)

    def _projected(
        self, projection: mpu.ColumnParallelLinear, x: Tensor, recipe: Recipe | None
    ) -> tuple[Tensor, Recipe | None]:
        """Return `projection(x)`, and the recipe to recompute this output if --recompute-modules names qkv, else None.

        recipe: how to recompute x; None if autograd saves x.
        """
        out, _ = projection(x)
        return out, Recipe(lambda given: projection(given)[0], recipe or x) if self.qkv_again else None


class SelfAttention(Attention):
    """Self-attention: every token attends to all tokens of its sequence, or (causal) to itself and earlier tokens.

    The rows of the fused projection are query, key and value of head 0, then query, key and value of head 1, and so
    on. For grouped-query attention, `grouped_heads.py` describes the order of the rows.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float, causal: bool = True) -> None:
        super().__init__(config, f"{name}.attention", output_std, causal)
        queries = config.num_attention_heads // config.key_value_heads
        self.query_key_value = self._project(
            config, *[config.query_factor] * queries, 1.0, 1.0, heads=config.key_value_heads, bias=config.has_qkv_bias
        )
        mpu.spec_of(self.query_key_value.weight).fused = mpu.FusedRows((queries, 1, 1), self.head_size)
        self.sharers = mpu.neighbours(self.axis, max(self.axis.size // config.key_value_heads, 1))
        self.query_norm = build_head_norm(config) if config.qk_norm else None
        self.key_norm = build_head_norm(config) if config.qk_norm else None
        self.in_groups = queries > 1 or config.qk_norm or config.position_embedding == "rope"
        self.plain_cut = self.in_groups and "rope" in config.reference_ops

    def forward(
        self,
        hidden: Tensor,
        mask: Mask,
        bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
        recipe: Recipe | None = None,
        angles: Rotation | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply self-attention: [s, b, h] -> ([s, b, h], output bias, which the caller must add).

        mask, bias: see `attend`. recipe: how to recompute `hidden`; None if autograd saves it. angles: rotary position
        embedding of queries and keys, or None.
        """
        qkv, again = self._projected(self.query_key_value, hidden, recipe)  # [s, b, (n/t + 2 g) * d]
        with save_recipe_for((again, qkv)):
            query, key, value = self._cut(qkv, angles)
        # query, key and value share one buffer here, so the recipe to recompute query's buffer recomputes all three.
        if again is not None and self.in_groups:
            again = Recipe(lambda given: self._cut(given, angles)[0], again)
            qkv = query
        if cache is not None:
            key, value = cache.extend(key, value)
        with save_recipe_for((again, qkv)):
            context = self.attend(query, key, value, mask, bias)
        return self.dense(context)  # type: ignore[no-any-return]

    def _cut(self, qkv: Tensor, angles: Rotation | None) -> tuple[Tensor, ...]:
        """Split [s, b, (n/t + 2 g) * d] into queries [b, n/t, s, d] and keys and values [b, g, s, d]."""
        if self.sharers.size > 1:
            qkv = own_queries(qkv, self.head_size, self.sharers)
        if self.query_norm is not None and self.key_norm is not None:
            heads = by_head(qkv, self.groups, self.head_size)
            normed = self.query_norm(heads[..., :-2, :]), self.key_norm(heads[..., -2:-1, :])
            qkv = torch.cat([*normed, heads[..., -1:, :]], 3).flatten(2)
        parts = self.heads // self.groups, 1, 1
        return split_heads(
            qkv, self.groups, self.head_size, parts, angles, one_buffer=self.in_groups, plain=self.plain_cut
        )


class CrossAttention(Attention):
    """Cross-attention from decoder to encoder.

    The rows of `key_value` are key and value of head 0, then key and value of head 1, and so on.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__(config, f"{name}.cross_attention", output_std, causal=False)
        self.query, self.key_value = self._project(config, config.query_factor), self._project(config, 1.0, 1.0)
        mpu.spec_of(self.key_value.weight).fused = mpu.FusedRows((1, 1), self.head_size)

    def forward(
        self,
        hidden: Tensor,
        encoded: Tensor,
        mask: Documents | None,
        cache: KeyValueCache | None = None,
        recipe: Recipe | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply cross-attention: (hidden [q, b, h], encoded [k, b, h]) -> ([q, b, h], bias).

        The caller must add the bias. recipe: how to recompute `hidden`; None if autograd saves it.
        """
        projected, again = self._projected(self.query, hidden, recipe)
        query = projected.view(*projected.shape[:2], self.heads, self.head_size).permute(1, 2, 0, 3)
        both = both_again = None
        if cache is not None and cache.key is not None and cache.value is not None:
            key = cache.key
            value = cache.value
        else:
            both, both_again = self._projected(self.key_value, encoded, None)
            key, value = split_heads(both, self.heads, self.head_size, (1, 1))
            if cache is not None:
                cache.extend(key, value)
        with save_recipe_for((again, projected), (both_again, both)):
            context = self.attend(query, key, value, mask, None)
        return self.dense(context)  # type: ignore[no-any-return]

"""Multi-head attention with its heads sharded over the model-parallel ranks.

Shapes: s, q sequence of the queries, k of the keys, b batch, h hidden, n heads, d width of a head, t
model-parallel ranks, g key-value heads of a rank: n/t, or fewer, each shared by a group of queries.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron import mpu
from megatron.config import ModelConfig

from . import attention_dropout, biased_attention, packed_attention
from .context_attention import Views, context_attention, gather_keys_and_values, pieces_for
from .document_attention import chunks_for, document_attention
from .grouped_heads import by_head, cut_groups, own_queries
from .heads import split_heads
from .masks import Documents, added_mask, causal_mask
from .norm import build_head_norm
from .recompute import Recipe, save_recipe_for
from .rotary import Rotation


def kernels_for(query: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Return a context that selects torch's attention kernels for query [b, n/t, q, d].

    With a mask on CUDA it excludes cuDNN's, which torch prefers on Hopper: its masked gradients are not
    finite for some lengths.
    """
    if mask is None or query.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _for_each(query: Tensor, key: Tensor) -> Tensor:
    """Repeat [b, g, k, d] to [b, n/t, k, d] for kernels without grouped heads: on CUDA fp32 and masked ones."""
    if key.shape[1] == query.shape[1]:
        return key
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


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
        """Append keys and values of new tokens, [b, g, q, d] each; return all, [b, g, k, d]."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        return key, value

    def reorder(self, rows: Tensor) -> None:
        """Replace row i of the batch by row rows[i], for beam search; rows: [b]."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[rows], self.value[rows]


def _fill_heads(std: float, head_size: int, factors: Sequence[float], weight: Tensor) -> None:
    """Draw normal values, and scale the rows of part i of each head by factors[i]."""
    nn.init.normal_(weight, 0.0, std)
    weight.view(-1, len(factors), head_size, weight.shape[1]).mul_(torch.tensor(factors).view(1, -1, 1, 1))


class Attention(nn.Module):
    """Common part of self- and cross-attention (Vaswani et al. 2017): softmax(q k^T + bias) v, output projection."""

    def __init__(self, config: ModelConfig, stream: str, output_std: float, causal: bool) -> None:
        super().__init__()
        self.axis, self.causal = mpu.get_mesh().model, causal
        self.heads = config.num_attention_heads // self.axis.size
        self.groups = max(config.key_value_heads // self.axis.size, 1)
        self.head_size = config.head_size
        self.inner = config.num_attention_heads * config.head_size
        self.scale = 1 / math.sqrt(self.head_size) if config.scale_attention else 1.0
        # Without the division of scores, queries are initialised smaller by the same factor
        # (Raffel et al. 2020).
        self.query_factor = 1.0 if config.scale_attention else 1 / math.sqrt(self.head_size)
        self.dropout, self.rng = config.attention_dropout, mpu.get_rng()
        self.stream = mpu.Stream(self.rng, stream, split=True)
        self.qkv_again = "qkv" in config.recompute_modules
        self.recompute, self.fused = config.checkpoint_attention, "biased-attention" not in config.reference_ops
        self.by_document = "document-attention" not in config.reference_ops
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
        """Build the projection h -> len(factors) x n x d, its rows ordered by head, so that each rank gets whole heads.

        factors: scale the initial values of each part. heads: n, by default the number of attention heads.
        bias: by default as --hidden-bias sets it.
        """
        return mpu.ColumnParallelLinear(
            config.hidden_size,
            len(factors) * (heads or config.num_attention_heads) * self.head_size,
            bias=config.hidden_bias if bias is None else bias,
            gather_output=False,
            init_method=partial(_fill_heads, config.init_method_std, self.head_size, factors),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Documents | Views | Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Compute attention: query [b, n/t, q, d], key, value [b, g, k, d] -> [q, b, n/t * d].

        mask: the documents to restrict attention to, or bool [1 or b, 1, q, k], True where a query may
        attend, or None. With context parallelism it is what this rank's queries see of all ranks' keys; key
        and value are this rank's.
        bias: [1, n/t, q, k], added to the scores, or None.
        """
        p = self.dropout if self.training else 0.0
        call = self._with_dropout if p and query.device.type != "cpu" else partial(self._sdpa, p=p)
        if self.recompute and self.training:
            call = partial(self._computed_again, call)
        context: Tensor = call(query, key, value, mask, bias)
        b, _, q, _ = context.shape
        return context.permute(2, 0, 1, 3).reshape(q, b, self.heads * self.head_size)

    def _computed_again(self, call: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return mpu.checkpoint(call, *inputs, rng=self.rng)  # type: ignore[no-any-return]

    def _with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Documents | Views | Tensor | None, bias: Tensor | None
    ) -> Tensor:
        with self.rng.fork(self.stream.name, query.device, self.stream.split):
            return self._sdpa(query, key, value, mask, bias, self.dropout)

    def _sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Documents | Views | Tensor | None,
        bias: Tensor | None,
        p: float,
        turn: int = 0,
    ) -> Tensor:
        if isinstance(mask, Views):
            return self._over_contexts(query, key, value, mask, p)
        if isinstance(mask, Documents):
            mask.refuse_others(query, key)
            found = self._document_by_document(query, key, value, mask, bias, p) if self.by_document else None
            if found is not None:
                return found
            mask = mask.mask()
        q, k = query.shape[2], key.shape[2]
        # A mask of documents is already causal where it must be. A single newest token sees all keys.
        plain_causal = self.causal and mask is None and q > 1
        by_hand = p > 0 and query.device.type == "cpu"
        if plain_causal and (bias is not None or q != k or by_hand):
            mask, plain_causal = causal_mask(q, k, query.device), False
        if bias is not None:
            if not p and self.fused and biased_attention.serves(query, bias):
                return biased_attention.biased_attention(query, key, value, bias, mask, self.scale)
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            mask = added_mask(mask, query.dtype)
        if by_hand:
            key, value = _for_each(query, key), _for_each(query, value)
            return attention_dropout.attention_with_dropout(query, key, value, mask, self.scale, p, self.stream, turn)
        grouped = key.shape[1] < query.shape[1]
        if grouped and query.device.type == "cuda" and (mask is not None or query.dtype == torch.float32):
            key, value, grouped = _for_each(query, key), _for_each(query, value), False
        with kernels_for(query, mask):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=p,
                is_causal=plain_causal,
                scale=self.scale,
                enable_gqa=grouped,
            )

    def _over_contexts(self, query: Tensor, key: Tensor, value: Tensor, views: Views, p: float) -> Tensor:
        """Attend from this rank's query to the keys and values of all context ranks -> [b, n/t, s/c, d].

        query: [b, n/t, s/c, d]. key, value: this rank's, [b, g, s/c, d].
        """
        pieces = pieces_for(query, views) if self.by_document and not p else None
        if pieces is not None:
            return context_attention(query, key, value, pieces, views.axis, self.scale)
        key, value = gather_keys_and_values(key, value, views.axis)
        found = []
        for at, own in enumerate(torch.split(query, views.each, 2)):
            begin, end = views.keys(at)
            seen = key[:, :, begin:end], value[:, :, begin:end]
            if views.masked or p or query.device.type == "cpu" or torch.compiler.is_compiling():
                found.append(self._sdpa(own, *seen, views.mask(at), None, p, turn=at))
            else:  # this kernel needs no mask
                keys, values = (_for_each(own, x) for x in seen)
                from torch.nn.attention.bias import causal_lower_right  # the import loads the compiler

                last: Any = causal_lower_right(own.shape[2], end)
                found.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=last, scale=self.scale))
        return torch.cat(found, 2)

    def _document_by_document(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents, bias: Tensor | None, p: float
    ) -> Tensor | None:
        """Attend document by document; None if a mask is faster or required."""
        chunks = chunks_for(query, documents)
        if chunks is not None:
            key, value = _for_each(query, key), _for_each(query, value)
        if bias is not None:
            if chunks is None or p or not self.fused:
                return None
            return biased_attention.biased_attention(query, key, value, bias, chunks, self.scale)
        if chunks is not None and not p:
            return document_attention(query, key, value, chunks, self.scale)
        if chunks is not None and chunks.once:
            return attention_dropout.by_document(query, key, value, chunks, self.scale, p, self.stream)
        # Packing copies queries, keys and values, but recomputation identifies them by their address.
        if not p and not self.qkv_again and packed_attention.serves(query, documents):
            key, value = _for_each(query, key), _for_each(query, value)
            return packed_attention.packed_attention(query, key, value, documents, self.scale)
        return None

    def _projected(
        self, projection: mpu.ColumnParallelLinear, x: Tensor, recipe: Recipe | None
    ) -> tuple[Tensor, Recipe | None]:
        """Return `projection(x)`, and its recipe if it is not to be saved. recipe: of x."""
        out, _ = projection(x)
        return out, Recipe(lambda given: projection(given)[0], recipe or x) if self.qkv_again else None


class SelfAttention(Attention):
    """Self-attention: every token attends to all tokens of its sequence, or (causal) to itself and earlier ones.

    Rows of the fused projection are (query, key, value) of head 0 first. `grouped_heads.py` describes their
    order in groups.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float, causal: bool = True) -> None:
        super().__init__(config, f"{name}.attention", output_std, causal)
        queries = config.num_attention_heads // config.key_value_heads
        self.query_key_value = self._project(
            config, *[self.query_factor] * queries, 1.0, 1.0, heads=config.key_value_heads, bias=config.has_qkv_bias
        )
        self.sharers = mpu.neighbours(self.axis, max(self.axis.size // config.key_value_heads, 1))
        self.query_norm = build_head_norm(config) if config.qk_norm else None
        self.key_norm = build_head_norm(config) if config.qk_norm else None
        self.plain_cut = "rope" in config.reference_ops
        self.in_groups = queries > 1 or config.qk_norm or config.position_embedding == "rope"

    def forward(
        self,
        hidden: Tensor,
        mask: Documents | Views | Tensor | None,
        bias: Tensor | None = None,
        cache: KeyValueCache | None = None,
        recipe: Recipe | None = None,
        turn: Rotation | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply self-attention: [s, b, h] -> ([s, b, h], its bias, which the caller must add).

        mask, bias: see `attend`. recipe: of `hidden`. turn: rotation of queries and keys.
        """
        qkv, again = self._projected(self.query_key_value, hidden, recipe)  # [s, b, (n/t + 2 g) * d]
        with save_recipe_for((again, qkv)):
            query, key, value = self._cut(qkv, turn)
        if again is not None and self.in_groups:  # autograd saves the parts, all in the memory of `query`
            again, qkv = Recipe(lambda given: self._cut(given, turn)[0], again), query
        if cache is not None:
            key, value = cache.extend(key, value)
        with save_recipe_for((again, qkv)):
            context = self.attend(query, key, value, mask, bias)
        return self.dense(context)  # type: ignore[no-any-return]

    def _cut(self, qkv: Tensor, turn: Rotation | None) -> tuple[Tensor, ...]:
        """Split [s, b, (n/t + 2 g) * d] into queries [b, n/t, s, d] and keys and values [b, g, s, d]."""
        if not self.in_groups:
            return split_heads(qkv, self.heads, 3)
        if self.sharers.size > 1:
            qkv = own_queries(qkv, self.head_size, self.sharers)
        if self.query_norm is not None and self.key_norm is not None:
            parts = by_head(qkv, self.groups, self.head_size)
            normed = self.query_norm(parts[..., :-2, :]), self.key_norm(parts[..., -2:-1, :])
            qkv = torch.cat([*normed, parts[..., -1:, :]], 3).flatten(2)
        return cut_groups(qkv, self.groups, self.head_size, turn, self.plain_cut)


class CrossAttention(Attention):
    """Cross-attention from decoder tokens to encoder tokens. The fused rows are (key, value) of head 0 first."""

    def __init__(self, config: ModelConfig, name: str, output_std: float) -> None:
        super().__init__(config, f"{name}.cross_attention", output_std, causal=False)
        self.query, self.key_value = self._project(config, self.query_factor), self._project(config, 1.0, 1.0)

    def forward(
        self,
        hidden: Tensor,
        encoded: Tensor,
        mask: Documents | None,
        cache: KeyValueCache | None = None,
        recipe: Recipe | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply cross-attention: (hidden [q, b, h], encoded [k, b, h]) -> ([q, b, h], bias).

        The caller must add the bias. recipe: of `hidden`.
        """
        projected, again = self._projected(self.query, hidden, recipe)
        query = projected.view(*projected.shape[:2], self.heads, self.head_size).permute(1, 2, 0, 3)
        both = both_again = None
        if cache is not None and cache.key is not None and cache.value is not None:
            key, value = cache.key, cache.value
        else:
            both, both_again = self._projected(self.key_value, encoded, None)
            key, value = split_heads(both, self.heads, 2)
            if cache is not None:
                cache.extend(key, value)
        with save_recipe_for((again, projected), (both_again, both)):
            context = self.attend(query, key, value, mask, None)
        return self.dense(context)  # type: ignore[no-any-return]

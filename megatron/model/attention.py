"""Multi-head attention with its heads sharded over the model-parallel ranks.

Shapes: s or q query tokens, k key tokens, b batch, h hidden, n heads, d width of a head, t model-parallel ranks,
g key-value heads of a rank: n/t, or fewer if each is shared by a group of query heads; p parts of a fused projection.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .attention_kernels import AttentionArgs, Kernel, Mask, attend

if TYPE_CHECKING:
    from .cache import KeyValueCache
    from .rotary import Rotation


def _init_heads(std: float, head_size: int, part_factors: Sequence[float], weight: Tensor) -> None:
    """Draw normal values, and scale the rows of part i (query, key or value) of each head by part_factors[i]."""
    nn.init.normal_(weight, 0.0, std)
    # For example, the factors (2, 1, 1) with head_size 4 double rows 0 to 3 of every 12.
    rows_by_part = weight.view(-1, len(part_factors), head_size, weight.shape[1])  # [groups, parts, rows, h]
    rows_by_part.mul_(torch.tensor(part_factors).view(1, -1, 1, 1))


class Attention(nn.Module):
    """Common part of self- and cross-attention (Vaswani et al. 2017): softmax(q k^T + bias) v, output projection.

    kernel: function that computes a `AttentionArgs`; `attend` lets `choose_kernel` choose.
    observe_call: function that is called with each attention call before it is computed, or None.
    """

    observe_call: Callable[[AttentionArgs], None] | None = None

    def __init__(self, config: ModelConfig, stream: str, output_std: float, causal: bool) -> None:
        super().__init__()
        self.axis = mpu.get_mesh().model
        self.heads = config.num_attention_heads // self.axis.size
        self.kv_heads = max(config.key_value_heads // self.axis.size, 1)  # 1 if several ranks share a key-value head
        self.head_size = config.head_size
        self.dropout = config.attention_dropout
        self.rng = mpu.get_rng()
        self.kernel: Kernel = attend
        self.stream = mpu.Stream(self.rng, stream, split=True)  # each rank draws for its own heads
        self.recompute = config.checkpoint_attention
        self.recomputes_qkv = "qkv" in config.recompute_modules  # see recomputed_attention.py
        self.make_call = partial(
            AttentionArgs,
            causal=causal,
            scale=config.attention_scale,
            stream=self.stream,
            allow_per_document="document-attention" not in config.reference_ops,
            allow_fused_bias="biased-attention" not in config.reference_ops,
            may_copy_qkv=not self.recomputes_qkv,
        )
        self.dense = mpu.RowParallelLinear(
            config.num_attention_heads * config.head_size,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=mpu.normal(output_std),
        )

    def _new_projection(self, config: ModelConfig, *factors: float, heads: int, bias: bool) -> mpu.ColumnParallelLinear:
        """Build the projection h -> len(factors) x heads x d, with rows ordered by head, so each rank gets whole heads.

        factors: for each projected part (query, key or value), the factor of its initial weights.
        """
        return mpu.ColumnParallelLinear(
            config.hidden_size,
            len(factors) * heads * self.head_size,
            bias=bias,
            gather_output=False,
            init_method=partial(_init_heads, config.hidden_std, self.head_size, factors),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """Compute attention: query [b, n/t, q, d], key, value [b, g, k, d] -> [q, b, n/t * d].

        mask: see `AttentionArgs`. bias: [1, n/t, q, k], added to the scores, or None.
        """
        p = self.dropout if self.training else 0.0
        compute: Callable[..., Tensor] = self._compute
        if p and query.device.type != "cpu":  # torch's kernel draws its dropout; on a CPU, ours uses the stream
            compute = self._compute_with_dropout
        inputs = query, key, value, mask, bias, p
        if self.recompute and self.training:
            context = self._compute_with_checkpoint(compute, *inputs)
        else:
            context = compute(*inputs)
        return context.permute(2, 0, 1, 3).flatten(2)  # [b, n/t, q, d] -> [q, b, n/t * d]

    def _compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, p: float) -> Tensor:
        call = self.make_call(query=query, key=key, value=value, mask=mask, bias=bias, p=p)
        if self.observe_call is not None:
            self.observe_call(call)
        return self.kernel(call)

    def _compute_with_checkpoint(self, compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return mpu.checkpoint(compute, *inputs, rng=self.rng)  # type: ignore[no-any-return]

    def _compute_with_dropout(self, query: Tensor, *inputs: Any) -> Tensor:
        """Compute attention by a kernel that draws dropout from torch's generator, which this layer's stream seeds."""
        with self.rng.fork(self.stream.name, query.device, self.stream.split):
            return self._compute(query, *inputs)


class SelfAttention(Attention):
    """Self-attention: every token attends to all tokens of its sequence, or (causal) to itself and earlier tokens.

    The rows of the fused projection are query, key and value of head 0, then query, key and value of head 1, and so
    on. `build_self_attention` says which classes replace this one.
    """

    def __init__(self, config: ModelConfig, name: str, output_std: float, causal: bool) -> None:
        super().__init__(config, f"{name}.attention", output_std, causal)
        group_size = config.num_attention_heads // config.key_value_heads  # query heads per key-value head
        query_factors = [config.query_factor] * group_size
        # Rows of a group: its queries, then a key and a value. Groups of 4 queries have 6 parts of `head_size` rows.
        self.query_key_value = self._new_projection(
            config, *query_factors, 1.0, 1.0, heads=config.key_value_heads, bias=config.has_qkv_bias
        )
        width = config.width_factor
        # (growth of inputs, growth of outputs) since muP's base model, for query, key and value; 1 without muP.
        key_value_growth = (width, config.key_value_growth)
        growth = ((width, width), key_value_growth, key_value_growth)
        fused = mpu.FusedRows((group_size, 1, 1), self.head_size, growth)
        mpu.spec_of(self.query_key_value.weight).fused = fused

    def forward(
        self,
        hidden: Tensor,
        mask: Mask,
        bias: Tensor | None = None,
        cache: "KeyValueCache | None" = None,
        angles: "Rotation | None" = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply self-attention: [s, b, h] -> ([s, b, h], output bias, which the caller must add).

        mask, bias: see `attend`. angles: rotary position embedding of queries and keys, or None.
        """
        qkv, _ = self.query_key_value(hidden)  # [s, b, (n/t + 2 g) * d]
        query, key, value = self.split_qkv(qkv, angles)
        if cache is not None:
            key, value = cache.extend(key, value)
        context = self.attend(query, key, value, mask, bias)
        return self.dense(context)  # type: ignore[no-any-return]

    def split_qkv(self, qkv: Tensor, angles: "Rotation | None") -> tuple[Tensor, ...]:
        """Split [s, b, (n/t + 2 g) * d] into queries [b, n/t, s, d] and keys and values [b, g, s, d]."""
        return split_heads(qkv, self.head_size, num_parts=3)


def split_heads(fused: Tensor, head_size: int, num_parts: int) -> tuple[Tensor, ...]:
    """Split `fused` [s, b, n * p * d], whose rows are all parts of head 0, then of head 1, into p tensors [b, n, s, d].

    head_size: d. num_parts: p. The results are views of `fused`.
    """
    by_head = fused.view(*fused.shape[:2], -1, num_parts, head_size)  # [s, b, n, p, d]
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile fuses the gradients itself
        views = by_head.unbind(3)
    else:
        views = _Split.apply(by_head)  # type: ignore[no-untyped-call]
    return tuple(part.permute(1, 2, 0, 3) for part in views)


class _Split(torch.autograd.Function):
    """Split [s, b, n, p, d] into p tensors [s, b, n, d].

    The backward pass writes each part's gradient straight into the gradient of the projection. torch's own operations
    would stack the gradients and then rearrange the stack, which copies each gradient twice.
    """

    @staticmethod
    def forward(ctx: Any, by_head: Tensor) -> tuple[Tensor, ...]:
        ctx.shape = by_head.shape
        ctx.set_materialize_grads(False)  # the gradient of an unused part is then None instead of zeros
        return tuple(by_head.select(3, part) for part in range(by_head.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:  # type: ignore[override]
        given = [grad for grad in grads if grad is not None]  # the gradient of an unused part is None
        if not given:
            return None
        grad_by_head = given[0].new_empty(ctx.shape)
        for part, grad in enumerate(grads):
            part_grad = grad_by_head.select(3, part)
            if grad is None:
                part_grad.zero_()
            else:
                part_grad.copy_(grad)
        return grad_by_head


def build_self_attention(config: ModelConfig, name: str, output_std: float, causal: bool) -> SelfAttention:
    """Return a layer's self-attention: plain, or a subclass for shared heads, norms, rotations or recomputation."""
    attention_class = SelfAttention
    shares_heads = config.key_value_heads < config.num_attention_heads
    if shares_heads or config.qk_norm or config.position_embedding == "rope":
        from .grouped_attention import GroupedSelfAttention

        attention_class = GroupedSelfAttention
    if {"norm", "qkv"} & set(config.recompute_modules):  # with "norm", attention is called with a recipe
        from .recomputed_attention import recomputed_self_attention

        attention_class = recomputed_self_attention(attention_class)
    return attention_class(config, name, output_std, causal)

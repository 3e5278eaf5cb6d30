"""Transformer layer: attention and MLP, each with a norm before it and a residual connection around it.

Shapes: s sequence, b batch, h hidden, f width of the MLP, t model-parallel ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig
from megatron.kernels import apex_class

from .attention import build_self_attention
from .attention_kernels import Mask
from .masks import DocumentRole, mask_function

if TYPE_CHECKING:
    from .cache import Caches
    from .rotary import Rotation
    from .routing import RoutingState


def build_norm(config: ModelConfig) -> nn.Module:
    """Build LayerNorm (Ba et al. 2016), or RMSNorm without mean and bias (Zhang and Sennrich 2019), over h."""
    return norm_of_size(config, config.hidden_size, rms=config.normalization == "rmsnorm", sequence=mpu.sequence_axis())


def norm_of_size(config: ModelConfig, size: int, rms: bool, sequence: mpu.Axis) -> nn.Module:
    """Build an RMSNorm or LayerNorm over `size` features: apex's if --kernels selects it, else one of our own.

    sequence: ranks over which weight gradients are summed; `mpu.LayerNorm` always takes `mpu.sequence_axis()`.
    """
    norm_class = apex_class(config.kernels, "normalization", "FusedRMSNorm" if rms else "FusedLayerNorm")  # or None
    if rms:
        if "rms-norm" in config.reference_ops:
            norm_class = nn.RMSNorm  # the reference, even with apex
        elif norm_class is None:  # without apex
            from .rms_norm import RMSNorm

            norm_class = RMSNorm
    elif norm_class is None:
        return mpu.LayerNorm(size, eps=config.layernorm_epsilon)  # it declares its weights itself
    norm = norm_class(size, eps=config.layernorm_epsilon)
    mpu.declare(norm.weight, mpu.ones, sequence=sequence)
    if not rms:
        mpu.declare(norm.bias, sequence=sequence)
    return norm  # type: ignore[no-any-return]


class Dropout(nn.Module):
    """Dropout that draws from a named stream, so that its masks do not depend on pipeline stages or schedule."""

    def __init__(self, p: float, stream: str) -> None:
        super().__init__()
        self.p = p
        # Under sequence parallelism each rank draws masks for its own shard.
        self.stream = mpu.Stream(mpu.get_rng(), stream, split=mpu.sequence_axis().size > 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [...] -> [...] in training; in evaluation return x."""
        return self.stream.drop(x, self.p) if self.training and self.p else x


def gelu(x: Tensor) -> Tensor:
    """Apply GELU to x [...] -> [...] in its tanh form, with which GPT-2 and T5 were trained."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu-tanh": gelu, "relu": torch.relu}


def build_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation function of --activation: [..., f] -> [..., f], with a gate [..., 2 f] -> [..., f]."""
    if not config.is_gated:
        return ACTIVATIONS[config.activation]
    from . import gated_activations

    if config.activation in config.reference_ops:
        return gated_activations.UNFUSED_ACTIVATIONS[config.activation]
    return gated_activations.GATED_ACTIVATIONS[config.activation]


class ParallelMLP(nn.Module):
    """MLP: a column-parallel matmul h -> f, an activation, and a row-parallel matmul f -> h with an all-reduce.

    With a gate the first matmul has 2 f outputs. The rows of gate and value alternate, so that a contiguous shard
    holds gate and value of a feature. Hugging Face's gate_proj is rows [::2] of this weight, its up_proj rows [1::2].
    """

    def __init__(self, config: ModelConfig, output_std: float) -> None:
        super().__init__()
        self.activation = build_activation(config)
        # torch saves a ReLU's output for its own backward pass, so recomputing the output would save no memory.
        self.recomputes_activation = "activation" in config.recompute_modules and config.activation != "relu"
        self.dense_h_to_4h = mpu.ColumnParallelLinear(
            config.hidden_size,
            config.ff_size * config.inner_projections,
            bias=config.hidden_bias,
            gather_output=False,
            init_method=mpu.normal(config.hidden_std),
        )
        if config.is_gated:
            mpu.spec_of(self.dense_h_to_4h.weight).fused = mpu.FusedRows((1, 1), 1)  # rows: gate, value, gate, ...
        self.dense_4h_to_h = mpu.RowParallelLinear(
            config.ff_size,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=mpu.normal(output_std),
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the MLP: [s, b, h] -> ([s, b, h], output bias, which the caller must add)."""
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, f/t] or [s, b, 2 f/t]
        if not self.recomputes_activation:
            return self.dense_4h_to_h(self.activation(inner))  # type: ignore[no-any-return]
        from .recompute import run_on_recomputed

        def project(active: Tensor, **_: Any) -> Any:  # `recipe`, how to recompute `active`, is not needed
            return self.dense_4h_to_h(active)

        return run_on_recomputed(self.activation, project, inner)  # type: ignore[no-any-return]


def build_mlp(config: ModelConfig, name: str, branches: int, decoder: bool) -> nn.Module:
    """Return the MLP of the layer `name`, or the mixture of experts that takes its place.

    branches: number of residual branches of the whole stack. decoder: whether the layer is one of a T5's decoder.
    """
    # The last part of the name is the number of the layer, 3 for layers.3. A layer without experts may have any name.
    has_experts = config.num_experts is not None and config.has_experts(int(name.rpartition(".")[2]))
    if not has_experts:
        return ParallelMLP(config, config.output_std(branches, config.ff_growth, decoder))
    from .mixture import Mixture

    return Mixture(config, f"{name}.mlp", config.output_std(branches, config.expert_ff_growth, decoder))


# normalised hidden states [s, b, h] -> (output, output bias or None)
Sublayer = Callable[..., tuple[Tensor, Tensor | None]]


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer (Radford et al. 2019).

    name: name of the layer in the whole model.
    branches: number of residual branches of the whole stack, by whose square root initial output weights are divided.
    stack_index, num_stacks: the layer's stack, from 0, and the model's number of stacks: 2 for encoder and decoder.
    """

    stack_index = 0
    num_stacks = 1

    def __init__(self, config: ModelConfig, name: str, branches: int, causal: bool = True) -> None:
        super().__init__()
        self.config = config
        is_decoder = self.stack_index == 1  # stack 0 is the encoder, or the only stack
        output_std = config.output_std(branches, config.width_factor, is_decoder)  # width_factor: 1 without muP
        self.branch_factor = config.decoder_branch_factor if is_decoder else config.branch_factor
        self.causal = causal
        self.sequence = mpu.sequence_axis()
        self.context = mpu.context_axis()
        self.input_layernorm = build_norm(config)
        self.attention = build_self_attention(config, name, output_std, causal)
        self.attention_dropout = Dropout(config.hidden_dropout, f"{name}.attention_output")
        self.build_cross_sublayer(config, name, output_std)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = build_mlp(config, name, branches, is_decoder)
        self.mlp_dropout = Dropout(config.hidden_dropout, f"{name}.mlp_output")
        self.offload_context: Callable[[bool], AbstractContextManager[Any]] = offload_nothing  # see `run_layer`
        self.run_on_normalised: Callable[..., tuple[Tensor, Tensor | None]] = run_on_normalised  # see `add_branch`
        if config.offload_activations:  # keep what the backward pass needs in host memory
            from .offload import offloaded

            self.offload_context = offloaded
        if "norm" in config.recompute_modules:  # recompute outputs of norms in the backward pass
            from .recompute import run_on_recomputed

            self.run_on_normalised = run_on_recomputed

    def run_layer(
        self,
        hidden: Tensor,
        mask: Mask,
        bias: Tensor | None = None,
        encoded: Any = None,
        caches: "Caches | None" = None,
        angles: "Rotation | None" = None,
        routing: "RoutingState | None" = None,
    ) -> Tensor:
        """Run the layer: [s, b, h] -> [s, b, h] (s/t with sequence parallelism).

        mask, bias, angles: see `SelfAttention`. encoded: for a T5's cross-attention. routing: for a layer with experts.
        """
        cache = caches.self_attention if caches else None

        # x: the normalised hidden states. With --recompute-modules, the keyword `recipe` says how to recompute x.
        def attend(x: Tensor, **recipe: Any) -> Any:
            return self.attention(x, mask, bias, cache, angles, **recipe)

        def run_mlp(x: Tensor, **recipe: Any) -> Any:  # needs no recipe
            if isinstance(self.mlp, ParallelMLP):
                return self.mlp(x)
            from .routing import run_mixture

            return run_mixture(self, x, routing)  # adds its loss to `routing`

        with self.offload_context(self.training):
            hidden = self.add_branch(self.input_layernorm, self.attention_dropout, attend, hidden)
            if encoded is not None:
                hidden = self.run_cross_sublayer(hidden, encoded, caches)
            return self.add_branch(self.post_attention_layernorm, self.mlp_dropout, run_mlp, hidden)

    def build_cross_sublayer(self, config: ModelConfig, name: str, output_std: float) -> None:
        """Build what a layer has between self-attention and MLP: cross-attention in a T5's decoder, else nothing."""

    def run_cross_sublayer(self, hidden: Tensor, encoded: Any, caches: "Caches | None") -> Tensor:
        """Run what `build_cross_sublayer` has built: [s, b, h] -> [s, b, h]."""
        raise NotImplementedError

    def make_routing(self, losses: list[Tensor], document_ids: Tensor) -> "RoutingState | None":
        """Return what the router of this layer needs to balance its experts; None if the layer has no experts.

        losses: [] or [summed loss [n] of earlier routers]; `run_layer` changes it in place. document_ids: [b, s].
        """
        if isinstance(self.mlp, ParallelMLP):
            return None
        from .routing import RoutingState
        from .text_tokens import text_tokens

        text = None  # in evaluation, padding need not be left out
        if self.training:
            text = text_tokens(document_ids, self.sequence, self.context)
        return RoutingState(losses, text)

    def add_branch(self, norm: nn.Module, dropout: Dropout, sublayer: Sublayer, hidden: Tensor) -> Tensor:
        """Add the residual branch to the hidden states [s, b, h]: hidden + factor * dropout(sublayer(norm(hidden)))."""
        added, bias = self.run_on_normalised(norm, sublayer, hidden)
        if bias is not None:
            added = added + bias
        branch: Tensor = dropout(added)
        if self.branch_factor != 1.0:
            branch = branch * self.branch_factor
        return hidden + branch


def offload_nothing(training: bool) -> AbstractContextManager[None]:
    """Return a context without effect, for layers whose activations stay on the device."""
    return nullcontext()  # with a value, it makes torch.compile fail where a user's layer breaks the graph


def run_on_normalised(norm: nn.Module, sublayer: Sublayer, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return sublayer(norm(hidden)) of hidden [s, b, h]; --recompute-modules norm uses `run_on_recomputed` instead."""
    return sublayer(norm(hidden))


class Block(TransformerLayer):
    """Layer of a decoder-only model. `name` is its name in the whole model.

    role: whether document ids restrict attention, restart positions, or both. By default they restrict attention.
    """

    def __init__(self, config: ModelConfig, name: str, role: DocumentRole | None = None) -> None:
        super().__init__(config, name, branches=2 * config.num_layers)
        self.role = role or DocumentRole()
        self.build_mask = mask_function(config.sliding_window, self.role, self.context)
        self.build_rotation: Callable[..., Rotation] | None = None
        if config.position_embedding == "rope":
            from .rotary import compute_rotation

            self.build_rotation = partial(compute_rotation, config, context=self.context)

    def forward(self, inputs: tuple[Tensor, ...], caches: "Caches | None" = None) -> tuple[Tensor, ...]:
        """Run the layer: (hidden [s, b, h], document ids [b, s] or empty) -> (new hidden states, the same ids).

        caches: keys and values of the text generated so far; positions continue after the cached tokens. With context
        parallelism hidden is this rank's part of the sequence, [s/c, b, h] for c ranks, and caches raise ValueError.
        If an earlier layer has experts, the last input is the summed loss [n] of its router; the last output adds the
        loss of this layer's router.
        """
        hidden, document_ids = inputs[:2]
        losses = list(inputs[2:])  # [] or [loss so far]; not `*losses`, which torch 2.11 compiles as a tuple
        s = mpu.whole_length(hidden, self.sequence) * self.context.size  # length of the whole sequence
        num_cached = caches.cached_length(self.context.size) if caches else 0
        mask = self.build_mask(document_ids, s, num_cached)
        angles = None
        if self.build_rotation:
            restart_positions = self.role.restarts_positions and not caches  # a generated text is one document
            angles = self.build_rotation(document_ids, s, num_cached, restart_positions)
        routing = self.make_routing(losses, document_ids)  # holds the list `losses`, which the router changes in place
        hidden = self.run_layer(hidden, mask, caches=caches, angles=angles, routing=routing)
        return hidden, document_ids, *losses  # now with the loss of this layer's router

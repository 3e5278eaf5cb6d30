"""Transformer layer: attention and MLP, each with a norm before it and a residual connection around it.

Shapes: s sequence, b batch, h hidden.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .attention import CrossAttention, KeyValueCache, SelfAttention
from .attention_kernels import Mask
from .context_attention import views_of
from .masks import DocumentRole, Documents, Text, document_scope, text_tokens, window_mask
from .mixture import Mixture
from .mlp import ParallelMLP
from .norm import build_norm
from .offload import offloaded
from .recompute import Recipe, save_recipe_for
from .rotary import Rotation, rotation


class Dropout(nn.Module):
    """Dropout that draws from a named stream, so that its masks do not depend on pipeline stages or schedule."""

    def __init__(self, p: float, stream: str) -> None:
        super().__init__()
        # Under sequence parallelism each rank draws masks for its own shard.
        self.p, self.stream = p, mpu.Stream(mpu.get_rng(), stream, split=mpu.sequence_axis().size > 1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [...] -> [...] in training; in evaluation return x."""
        return self.stream.drop(x, self.p) if self.training and self.p else x


class Encoded(NamedTuple):
    """Encoder output [k, b, h] to which a decoder layer attends, and the documents that restrict this attention."""

    states: Tensor
    mask: Documents | None


class Caches:
    """Key-value caches of one layer for incremental decoding."""

    def __init__(self) -> None:
        self.own, self.cross = KeyValueCache(), KeyValueCache()


# (normalised hidden states [s, b, h], their recipe for recomputation or None) -> (output, output bias or None)
Sublayer = Callable[[Tensor, Recipe | None], tuple[Tensor, Tensor | None]]


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer (Radford et al. 2019), optionally with cross-attention.

    name: name of the layer in the whole model.
    branches: number of residual branches of the whole stack, see `ModelConfig.output_std`.
    stack, stacks: number of the layer's stack, from 0, and number of stacks of the model: 2 for encoder and decoder.
    """

    stack = 0
    stacks = 1

    def __init__(self, config: ModelConfig, name: str, branches: int, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        output_std = config.output_std(branches)
        self.branch_factor = config.branch_factor
        self.causal, self.sequence, self.context = causal, mpu.sequence_axis(), mpu.context_axis()
        self.input_layernorm = build_norm(config)
        self.attention = SelfAttention(config, name, output_std, causal)
        self.attention_dropout = Dropout(config.hidden_dropout, f"{name}.attention_output")
        if cross:
            self.cross_layernorm = build_norm(config)
            self.cross_attention = CrossAttention(config, name, output_std)
            self.cross_dropout = Dropout(config.hidden_dropout, f"{name}.cross_attention_output")
        self.post_attention_layernorm = build_norm(config)
        has_experts = config.num_experts is not None and config.has_experts(int(name.rpartition(".")[2]))
        self.mlp = Mixture(config, f"{name}.mlp", output_std) if has_experts else ParallelMLP(config, output_std)
        self.offload = config.offload_activations
        self.norm_again = "norm" in config.recompute_modules
        self.mlp_dropout = Dropout(config.hidden_dropout, f"{name}.mlp_output")

    def layer(
        self,
        hidden: Tensor,
        mask: Mask,
        bias: Tensor | None = None,
        encoded: Encoded | None = None,
        caches: Caches | None = None,
        angles: Rotation | None = None,
        router_losses: list[Tensor] | None = None,
        text: Text | None = None,
    ) -> Tensor:
        """Run the layer: [s, b, h] -> [s, b, h] (s/t with sequence parallelism).

        mask, bias, angles: arguments of self-attention, see `SelfAttention`.
        router_losses: list to which a layer with experts adds the loss of its router, see `Routing`: [n] for the n
        stacks of the model, 0 except for its own stack.
        text: which tokens are text; routers leave out padding in training.
        """
        own, other = (caches.own, caches.cross) if caches else (None, None)
        with offloaded() if self.offload and self.training else nullcontext():
            hidden = self._add(
                self.input_layernorm,
                self.attention_dropout,
                lambda x, recipe: self.attention(x, mask, bias, own, recipe, angles),
                hidden,
            )
            if encoded is not None:
                hidden = self._add(
                    self.cross_layernorm,
                    self.cross_dropout,
                    lambda x, recipe: self.cross_attention(x, *encoded, other, recipe),
                    hidden,
                )

            def mlp(x: Tensor, _: Recipe | None) -> tuple[Tensor, Tensor | None]:
                added, bias, *loss = self.mlp(x, text) if isinstance(self.mlp, Mixture) else self.mlp(x)
                if loss and router_losses is None:
                    raise ValueError("a layer with experts needs `router_losses`, a list for the loss of its router")
                if router_losses is not None:
                    router_losses.extend(F.pad(each, (self.stack, self.stacks - 1 - self.stack)) for each in loss)
                return added, bias

            return self._add(self.post_attention_layernorm, self.mlp_dropout, mlp, hidden)

    def text(self, document_ids: Tensor) -> Text | None:
        """Return which tokens the router counts by document ids [b, s]; None for all, or if nothing is counted."""
        if not (self.training and isinstance(self.mlp, Mixture)):
            return None
        return text_tokens(document_ids, self.sequence, self.context)

    def _add(self, norm: nn.Module, dropout: Dropout, sublayer: Sublayer, hidden: Tensor) -> Tensor:
        """Add the residual branch to the hidden states [s, b, h]: hidden + factor * dropout(sublayer(norm(hidden)))."""
        normed = norm(hidden)
        recipe = Recipe(norm, hidden) if self.norm_again else None
        with save_recipe_for((recipe, normed)):
            added, bias = sublayer(normed, recipe)
        branch: Tensor = dropout(added if bias is None else added + bias)
        return hidden + (branch if self.branch_factor == 1.0 else branch * self.branch_factor)


def summed(losses: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a tuple with the sum [n] of routers' losses [n], or an empty tuple if there are none."""
    return (torch.stack(list(losses)).sum(0),) if losses else ()


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices that Muon orthogonalises: the weights of the linear layers inside transformer layers.

    The attribute `use_muon` of a weight, True or False, overrides this choice; DeepSpeed reads the same attribute.
    """
    kinds = nn.Linear, mpu.ColumnParallelLinear, mpu.RowParallelLinear
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    inside = {module.weight for layer in layers for module in layer.modules() if isinstance(module, kinds)}
    return {p for p in model.parameters() if p.requires_grad and getattr(p, "use_muon", p in inside)}


class Block(TransformerLayer):
    """Layer of a decoder-only model. `name` is its name in the whole model.

    role: whether document ids restrict attention, restart positions, or both. By default they restrict attention.
    """

    def __init__(self, config: ModelConfig, name: str, role: DocumentRole | None = None) -> None:
        super().__init__(config, name, branches=2 * config.num_layers)
        self.config = config
        self.window = config.sliding_window
        self.rotary = config.position_embedding == "rope"
        self.role = role or DocumentRole()

    def forward(self, inputs: tuple[Tensor, ...], caches: Caches | None = None) -> tuple[Tensor, ...]:
        """Run the layer: (hidden [s, b, h], document ids [b, s] or empty) -> (new hidden states, the same ids).

        caches: keys and values of the text generated so far; positions continue after the cached tokens. With
        context parallelism hidden is this rank's part of the sequence, [s/c, b, h] for c ranks, and passing
        caches raises ValueError.
        If an earlier layer has experts, the last input is the summed loss [n] of its router; the last output adds the
        loss of this layer's router.
        """
        if caches and self.context.size > 1:
            raise ValueError(
                "text generation does not support context parallelism: "
                "build the model with a context-parallel size of 1"
            )
        hidden, document_ids = inputs[:2]
        losses = list(inputs[2:])  # not `*losses`, which torch 2.11 compiles as a tuple
        s = mpu.whole_length(hidden, self.sequence) * self.context.size
        seen = caches.own.length if caches else 0
        documents = document_scope(document_ids, causal=True) if self.role.attention else None
        mask: Mask = documents
        if self.context.size > 1:
            mask = views_of(document_ids, s, self.window, documents, self.context)
        elif self.window is not None:
            mask = window_mask(document_ids, s, seen, self.window, documents)
        restart = self.role.positions and not caches
        angles = rotation(self.config, document_ids, s, seen, restart, self.context) if self.rotary else None
        text = self.text(document_ids)
        hidden = self.layer(hidden, mask, caches=caches, angles=angles, router_losses=losses, text=text)
        return hidden, document_ids, *summed(losses)

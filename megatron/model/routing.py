"""Routing in layers with experts: the loss of their routers, and the tokens that count in it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .block import TransformerLayer
from .gpt2_layers import WordEmbedding
from .layers import Layer
from .text_tokens import Text


class RoutingState(NamedTuple):
    """State that a layer with experts shares with the other layers of its stack.

    losses: a list of the summed loss of the routers so far, [n] for the n stacks of the model, or an empty list.
    text: which tokens are text; routers leave out padding. None for all, or in evaluation.
    """

    losses: list[Tensor]
    text: Text | None


def run_mixture(layer: TransformerLayer, x: Tensor, routing: RoutingState | None) -> tuple[Tensor, Tensor | None]:
    """Apply the mixture of `layer`: [s, b, h] -> ([s, b, h], bias); add the loss of its router to `routing`."""
    if routing is None:
        raise ValueError("a layer with experts needs `routing`, which takes the loss of its router")
    output, bias, loss = layer.mlp(x, routing.text)
    # [n], 0 except for the layer's own stack: of 2 stacks, a layer of stack 1 gives [0, loss].
    loss_by_stack = F.pad(loss, (layer.stack_index, layer.num_stacks - 1 - layer.stack_index))
    # Add the losses of earlier layers, if any: the list has one tensor or none. It changes in place, because the layer
    # that made `routing` returns this list.
    routing.losses[:] = [torch.stack([*routing.losses, loss_by_stack]).sum(0)]
    return output, bias


def with_router_loss(layers: Sequence[Layer]) -> list[Layer]:
    """Declare the routers' loss as an output of the layers, from the first layer with a mixture of experts on.

    Later layers pass it on, so that it reaches the end of the model. It is the last output, but before a table of
    relative positions: ("hidden",) becomes ("hidden", "router_loss").
    """
    with_losses = []
    after_experts = False
    for layer in layers:
        after_experts = after_experts or layer.routes
        if after_experts:
            outputs = list(layer.outputs)
            position = len(outputs)
            if outputs[-1] == "table":
                position -= 1
            outputs.insert(position, "router_loss")
            # Transformer layers return the loss themselves; the word embedding returns only the logits.
            call = _logits_and_loss if "logits" in outputs else layer.call
            layer = replace(layer, call=call, outputs=tuple(outputs))
        with_losses.append(layer)
    return with_losses


def _logits_and_loss(embedding: WordEmbedding, inputs: tuple[Tensor, ...]) -> Any:
    """Return the logits of (hidden [s, b, h], ..., loss) and the routers' loss [n]; in evaluation only the logits."""
    logits = embedding.run_output_layer(inputs)
    if not embedding.training:
        return logits
    return logits, inputs[-1]

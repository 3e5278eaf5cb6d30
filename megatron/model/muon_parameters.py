"""Weights that the optimizer treats in a special way: those that Muon orthogonalises, and those of embeddings."""

from torch import Tensor, nn

from megatron import mpu

from .gpt2_layers import ModelStart
from .layer_stack import transformer_layers
from .layers import global_parameters

Weights = set[nn.Parameter]


def muon_parameters(model: nn.Module) -> Weights:
    """Return the matrices that Muon orthogonalises: the weights of the linear layers inside transformer layers.

    The attribute `use_muon` of a weight, True or False, overrides this choice; DeepSpeed reads the same attribute.
    """
    layer_weights = set[Tensor]()
    for layer in transformer_layers(model):
        for module in layer.modules():
            if isinstance(module, (nn.Linear, mpu.ColumnParallelLinear, mpu.RowParallelLinear)):
                layer_weights.add(module.weight)
    chosen = Weights()
    for p in model.parameters():
        if p.requires_grad and getattr(p, "use_muon", p in layer_weights):
            chosen.add(p)
    return chosen


def embedding_weights(model: nn.Module) -> Weights:
    """Return the token and position tables, including an output weight that is tied to one of them."""
    weights = Weights()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, mpu.VocabParallelEmbedding, ModelStart)):
            weights.update(module.parameters(recurse=False))
    for name, p in global_parameters(model):
        if name.startswith("head."):  # an output weight that is not tied
            weights.discard(p)
    return weights

"""The weights that Muon orthogonalises."""

from typing import Any

from torch import nn

from megatron import mpu

from .block import TransformerLayer


def muon_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the matrices that Muon orthogonalises: the weights of the linear layers inside transformer layers.

    The attribute `use_muon` of a weight, True or False, overrides this choice; DeepSpeed reads the same attribute.
    """
    inside: set[nn.Parameter] = set()
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            inside |= _linear_weights(layer)
    return {p for p in model.parameters() if p.requires_grad and getattr(p, "use_muon", p in inside)}


def _linear_weights(layer: nn.Module) -> set[nn.Parameter]:
    kinds = nn.Linear, mpu.ColumnParallelLinear, mpu.RowParallelLinear
    linear: list[Any] = [module for module in layer.modules() if isinstance(module, kinds)]
    return {module.weight for module in linear}

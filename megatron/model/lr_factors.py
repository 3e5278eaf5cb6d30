"""muP's factors of the learning rate (Yang et al. 2022) for the weights of a model."""

from torch import nn

from megatron import mpu
from megatron.config import ModelConfig, mup
from megatron.config.mup import Growth

from .block import ParallelMLP
from .layer_stack import transformer_layers
from .mixture import Expert
from .muon_parameters import muon_parameters


def layer_lr_factors(model: nn.Module, config: ModelConfig, muon: str | None = None) -> dict[nn.Parameter, float]:
    """Return muP's factor of the learning rate for each weight of the transformer layers; no other weight has one.

    Each matrix has the factor that follows from its own numbers of inputs and outputs, see `config.mup`. Vectors have
    only the factor of the depth. Embeddings, positions and the output matrix keep their learning rates.
    muon: --muon-adjust-lr-fn if Muon steps the matrices, else None.
    """
    muon_weights = muon_parameters(model) if muon else set()
    growth = {}  # how much larger the matrices of MLPs and experts are than in muP's base model
    for mlp in model.modules():
        if isinstance(mlp, ParallelMLP):
            inner_growth = config.expert_ff_growth if isinstance(mlp, Expert) else config.ff_growth
            growth[mlp.dense_h_to_4h.weight] = Growth(config.width_factor, inner_growth)
            growth[mlp.dense_4h_to_h.weight] = Growth(inner_growth, config.width_factor)
    default_growth = Growth(config.width_factor, config.width_factor)

    def divisor(p: nn.Parameter) -> float:
        spec = mpu.spec_of(p)
        weight_growth = growth.get(p, default_growth)
        if muon and p in muon_weights:
            # The shape matters only for MLPs, and there gate and value, fused to one weight, have the same shape.
            return mup.muon_divisor(weight_growth, spec.matrices[0], muon)
        if len(spec.local_shape) == 1:  # a bias or the weight of a norm: its change is not summed over inputs
            return 1.0
        # Adam changes each element by about the learning rate. An output sums these changes, many of one sign, over its
        # inputs.
        return weight_growth.inputs

    factors = {}
    for layer in transformer_layers(model):
        for p in layer.parameters():
            factors[p] = layer.branch_factor / divisor(p)
    return factors

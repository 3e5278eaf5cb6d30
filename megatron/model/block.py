"""One transformer layer: attention and MLP, each with a norm before it and a residual around it.

Shapes: s sequence, b batch, h hidden.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .attention import SelfAttention
from .mlp import ParallelMLP


class Dropout(nn.Module):
    """Dropout that draws from a named stream, so that its masks depend neither on stages nor schedule."""

    def __init__(self, p: float, stream: str) -> None:
        super().__init__()
        self.p, self.stream, self.rng = p, stream, mpu.get_mesh().rng

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        with self.rng.fork(self.stream, x.device):
            return F.dropout(x, self.p)


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """A layer norm over h, a copy on every model-parallel rank."""
    norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
    mpu.declare(norm.weight, init_std=None)
    mpu.declare(norm.bias)
    return norm


class Block(nn.Module):
    """A pre-norm transformer layer (Radford et al. 2019). `name` is its name in the whole model."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        # Residual branches start smaller the more of them are summed.
        output_std = config.init_method_std / math.sqrt(2 * config.num_layers)
        self.input_layernorm = layer_norm(config)
        self.attention = SelfAttention(config, name, output_std)
        self.attention_dropout = Dropout(config.hidden_dropout, f"{name}.attention_output")
        self.post_attention_layernorm = layer_norm(config)
        self.mlp = ParallelMLP(config, output_std)
        self.mlp_dropout = Dropout(config.hidden_dropout, f"{name}.mlp_output")

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden [s, b, h], document ids [b, s] or empty) -> the same."""
        hidden, document_ids = inputs
        added, bias = self.attention(self.input_layernorm(hidden), document_ids)
        hidden = hidden + self.attention_dropout(added if bias is None else added + bias)
        added, bias = self.mlp(self.post_attention_layernorm(hidden))
        hidden = hidden + self.mlp_dropout(added if bias is None else added + bias)
        return hidden, document_ids

"""Feed-forward part of a transformer layer, sharded over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, f width of the MLP, t model-parallel ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig


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
    """MLP h -> f, activation, f -> h, with a column-parallel first and a row-parallel second matmul.

    So the forward pass needs one all-reduce.
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
            config.ff_size * (2 if config.is_gated else 1),
            bias=config.hidden_bias,
            gather_output=False,
            init_method=mpu.normal(config.hidden_std),
        )
        if config.is_gated:
            mpu.spec_of(self.dense_h_to_4h.weight).fused = mpu.FusedRows((1, 1), 1)  # gate, value, gate, ...
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
        if self.recomputes_activation:
            from .recompute import run_on_recomputed

            # `**_` is the recipe of the activation, which only attention uses.
            return run_on_recomputed(self.activation, lambda active, **_: self.dense_4h_to_h(active), inner)  # type: ignore[no-any-return]
        return self.dense_4h_to_h(self.activation(inner))  # type: ignore[no-any-return]


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

"""The two linear layers of a transformer block, split over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, f inside the MLP, t model-parallel ranks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig


class ParallelMLP(nn.Module):
    """h -> f, gelu, f -> h. The first is split by columns, the second by rows: one all-reduce in all."""

    def __init__(self, config: ModelConfig, output_std: float) -> None:
        super().__init__()
        self.dense_h_to_4h = mpu.ColumnParallelLinear(
            config.hidden_size,
            config.ff_size,
            bias=config.hidden_bias,
            gather_output=False,
            init_std=config.init_method_std,
        )
        self.dense_4h_to_h = mpu.RowParallelLinear(
            config.ff_size,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_std=output_std,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> ([s, b, h], its bias still to be added)."""
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, f/t]
        # The tanh form is the one that GPT-2 was trained with.
        return self.dense_4h_to_h(F.gelu(inner, approximate="tanh"))  # type: ignore[no-any-return]

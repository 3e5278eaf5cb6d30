"""The feed-forward part of a transformer block, split over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, f inside the MLP, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .recompute import Recipe, instead_of

Slope = Callable[[Tensor, Tensor], Tensor]  # gradient of what a function gives, its input -> gradient of its input


def gelu(x: Tensor) -> Tensor:
    """[...] -> [...], the tanh form, which GPT-2 and T5 were trained with."""
    return F.gelu(x, approximate="tanh")


class _Gated(torch.autograd.Function):
    """Keeps only its input. On a CPU gate and value are taken apart first: on every second number torch is four times slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], slope: Slope) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.slope = function, slope
        gate, value = _apart(x)
        return function(gate).mul_(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate, value = _apart(x)
        of_value = ctx.function(gate).mul_(grad)
        of_gate = ctx.slope(value * grad, gate)
        return torch.stack([of_gate, of_value], -1).view(x.shape), None, None


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")  # type: ignore[no-any-return]


def _apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2 f] -> gate and value, [..., f] each: copies on a CPU, views elsewhere."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    gate, value = pairs[..., 0], pairs[..., 1]
    return (gate.contiguous(), value.contiguous()) if x.device.type == "cpu" else (gate, value)


def gated_gelu(x: Tensor) -> Tensor:
    """[..., 2 f], gate and value of each feature next to each other -> [..., f] (Shazeer 2020)."""
    return _Gated.apply(x, gelu, _gelu_backward)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 f], as above -> [..., f], the gate through x sigmoid(x)."""
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward)  # type: ignore[no-untyped-call,no-any-return]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu,
    "relu": torch.relu,
    "gated-gelu": gated_gelu,
    "swiglu": swiglu,
}
UNFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "gated-gelu": lambda x: gelu(x[..., ::2]) * x[..., 1::2],
    "swiglu": lambda x: F.silu(x[..., ::2]) * x[..., 1::2],
}


class ParallelMLP(nn.Module):
    """h -> f, activation, f -> h. The first is split by columns, the second by rows: one all-reduce in all.

    With a gate the first gives 2 f, the rows of gate and value alternating, so that a contiguous
    cut leaves both of a feature on one rank. Hugging Face's gate_proj and up_proj are rows [::2] and [1::2].
    """

    def __init__(self, config: ModelConfig, output_std: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        # A relu keeps what it puts out itself.
        self.activation_again = "activation" in config.recompute_modules and config.activation != "relu"
        if config.activation in config.unfused:
            self.activation = UNFUSED[config.activation]
        self.dense_h_to_4h = mpu.ColumnParallelLinear(
            config.hidden_size,
            config.ff_size * (2 if config.gated else 1),
            bias=config.hidden_bias,
            gather_output=False,
            init_method=mpu.normal(config.init_method_std),
        )
        self.dense_4h_to_h = mpu.RowParallelLinear(
            config.ff_size,
            config.hidden_size,
            bias=config.hidden_bias,
            input_is_parallel=True,
            skip_bias_add=True,
            init_method=mpu.normal(output_std),
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> ([s, b, h], its bias still to be added)."""
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, f/t] or [s, b, 2 f/t]
        active = self.activation(inner)
        recipe = Recipe(self.activation, inner) if self.activation_again else None
        with instead_of((recipe, active)):
            return self.dense_4h_to_h(active)  # type: ignore[no-any-return]

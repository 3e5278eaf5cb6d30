"""Feed-forward part of a transformer layer, sharded over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, f width of the MLP, t model-parallel ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig

from .recompute import Recipe, save_recipe_for

# (gradient of a function's output, the function's input) -> gradient of that input
Slope = Callable[[Tensor, Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    """Apply GELU to x [...] -> [...] in its tanh form, with which GPT-2 and T5 were trained."""
    return F.gelu(x, approximate="tanh")


class _Gated(torch.autograd.Function):
    """Gated activation that saves only its input.

    On a CPU, gate and value are first copied to contiguous tensors, because torch is four times slower on strided ones.
    """

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
    """Split [..., 2 f] into gate and value, [..., f] each: copies on a CPU, views on accelerators."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    gate, value = pairs[..., 0], pairs[..., 1]
    return (gate.contiguous(), value.contiguous()) if x.device.type == "cpu" else (gate, value)


def gated_gelu(x: Tensor) -> Tensor:
    """Apply gated GELU (Shazeer 2020): [..., 2 f], with gate and value of each feature adjacent, -> [..., f]."""
    return _Gated.apply(x, gelu, _gelu_backward)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Apply SwiGLU, whose gate is x sigmoid(x): [..., 2 f], gate and value of each feature adjacent, -> [..., f]."""
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
    """MLP h -> f, activation, f -> h, with a column-parallel first and a row-parallel second matmul.

    So the forward pass needs one all-reduce.
    With a gate the first matmul has 2 f outputs. The rows of gate and value alternate, so that a contiguous shard
    holds gate and value of a feature. Hugging Face's gate_proj is rows [::2] of this weight, its up_proj rows [1::2].
    """

    def __init__(self, config: ModelConfig, output_std: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        # torch saves a ReLU's output for its own backward pass, so recomputing the output would save no memory.
        self.activation_again = "activation" in config.recompute_modules and config.activation != "relu"
        if config.activation in config.reference_ops:
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
        """Apply the MLP: [s, b, h] -> ([s, b, h], output bias, which the caller must add)."""
        inner, _ = self.dense_h_to_4h(hidden)  # [s, b, f/t] or [s, b, 2 f/t]
        active = self.activation(inner)
        recipe = Recipe(self.activation, inner) if self.activation_again else None
        with save_recipe_for((recipe, active)):
            return self.dense_4h_to_h(active)  # type: ignore[no-any-return]

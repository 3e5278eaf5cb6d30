"""Feed-forward part of a transformer layer, sharded over the model-parallel ranks.

Shapes: s sequence, b batch, h hidden, f width of the MLP, t model-parallel ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.config import ModelConfig
from megatron.fused import Fused

from .recompute import Recipe, save_recipe_for


def gelu(x: Tensor) -> Tensor:
    """Apply GELU to x [...] -> [...] in its tanh form, with which GPT-2 and T5 were trained."""
    return F.gelu(x, approximate="tanh")


class GatedActivation:
    """Gated activation function(gate) * value: x [..., 2 f], with gate and value of each feature adjacent, -> [..., f].

    slope: (gradient of the function's output, gate) -> gradient of the gate. Its keyword `grad_input` gives the tensor
    to write this gradient to.
    `value` and `gradient` are the two functions that training calls; the other methods are their definitions.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], slope: Callable[..., Tensor]) -> None:
        self._function = function
        self._slope = slope
        self.value = Fused(self.plain, self.eager)
        self.gradient = Fused(self.plain_gradient, self.eager_gradient)

    def plain(self, x: Tensor) -> Tensor:
        """Compute the activation, [..., 2 f] -> [..., f]."""
        gate, value = _gate_and_value(x)
        return self._function(gate) * value

    def plain_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of x [..., 2 f] from `grad` [..., f], the gradient of the result."""
        gate, value = _gate_and_value(x)
        return torch.stack([self._slope(value * grad, gate), self._function(gate) * grad], -1).view(x.shape)

    def eager(self, x: Tensor) -> Tensor:
        """Compute the activation, [..., 2 f] -> [..., f], with fewer passes over memory than `plain`."""
        gate, value = _gate_and_value(x)
        if x.device.type == "cpu":  # torch is four times slower on strided tensors
            gate = gate.contiguous()
            value = value.contiguous()
        return self._function(gate).mul_(value)

    def eager_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of x [..., 2 f] with fewer passes over memory than `plain_gradient`."""
        if x.device.type != "cpu":
            return self.gradient_in_place(grad, x)
        gate, value = (part.contiguous() for part in _gate_and_value(x))
        of_value = self._function(gate).mul_(grad)
        return torch.stack([self._slope(value * grad, gate), of_value], -1).view(x.shape)

    def gradient_in_place(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of x [..., 2 f] without a stack: write those of gate and value to their places."""
        gate, value = _gate_and_value(x)
        whole = torch.empty_like(x)
        of_gate, of_value = _gate_and_value(whole)
        torch.mul(self._function(gate), grad, out=of_value)
        self._slope(value * grad, gate, grad_input=of_gate)
        return whole


def _gate_and_value(x: Tensor) -> tuple[Tensor, Tensor]:
    """View [..., 2 f] as gate and value, [..., f] each, whose elements alternate in x."""
    return x[..., ::2], x[..., 1::2]


GATED_GELU = GatedActivation(gelu, partial(torch.ops.aten.gelu_backward, approximate="tanh"))
SWIGLU = GatedActivation(F.silu, torch.ops.aten.silu_backward)


class _Gated(torch.autograd.Function):
    """Gated activation that saves only its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: GatedActivation) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        return activation.value(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.activation.gradient(grad, x), None


def gated_gelu(x: Tensor) -> Tensor:
    """Apply gated GELU (Shazeer 2020): [..., 2 f], with gate and value of each feature adjacent, -> [..., f]."""
    return _Gated.apply(x, GATED_GELU)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Apply SwiGLU, whose gate is x sigmoid(x): [..., 2 f], gate and value of each feature adjacent, -> [..., f]."""
    return _Gated.apply(x, SWIGLU)  # type: ignore[no-untyped-call,no-any-return]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": gelu,
    "relu": torch.relu,
    "gated-gelu": gated_gelu,
    "swiglu": swiglu,
}
UNFUSED: dict[str, Callable[[Tensor], Tensor]] = {"gated-gelu": GATED_GELU.plain, "swiglu": SWIGLU.plain}


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
            init_method=mpu.normal(config.hidden_std),
        )
        if config.gated:
            mpu.spec_of(self.dense_h_to_4h.weight).fused = mpu.FusedRows((1, 1), 1)
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

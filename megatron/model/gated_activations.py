"""Gated activation functions of an MLP, with a backward pass of few passes over memory.

Shapes: f width of the MLP.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.fused import Fused

from .block import gelu


class GatedActivation:
    """Gated activation function(gate) * value: x [..., 2 f], with gate and value of each feature adjacent, -> [..., f].

    function_grad: (gradient of the function's output, gate) -> gradient of the gate. Its keyword `grad_input` gives the
    tensor to write this gradient to.
    `forward` and `backward` are the two functions that training calls; the other methods are their definitions.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], function_grad: Callable[..., Tensor]) -> None:
        self._function = function
        self._function_grad = function_grad
        self.forward = Fused(self.plain, self.eager)
        self.backward = Fused(self.plain_gradient, self.eager_gradient)

    def plain(self, x: Tensor) -> Tensor:
        """Compute the activation, [..., 2 f] -> [..., f]."""
        gate, value = _gate_and_value(x)
        return self._function(gate) * value

    def plain_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of x [..., 2 f] from `grad` [..., f], the gradient of the result."""
        gate, value = _gate_and_value(x)
        gate_grad = self._function_grad(value * grad, gate)
        value_grad = self._function(gate) * grad
        return torch.stack([gate_grad, value_grad], -1).view(x.shape)

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
        gate, value = (part.contiguous() for part in _gate_and_value(x))  # faster on CPUs, see `eager`
        value_grad = self._function(gate).mul_(grad)
        gate_grad = self._function_grad(value * grad, gate)
        return torch.stack([gate_grad, value_grad], -1).view(x.shape)

    def gradient_in_place(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute the gradient of x [..., 2 f] without a stack: write those of gate and value to their places."""
        gate, value = _gate_and_value(x)
        x_grad = torch.empty_like(x)
        gate_grad, value_grad = _gate_and_value(x_grad)
        torch.mul(self._function(gate), grad, out=value_grad)
        self._function_grad(value * grad, gate, grad_input=gate_grad)
        return x_grad


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
        return activation.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ctx.activation.backward(grad, x), None


def gated_gelu(x: Tensor) -> Tensor:
    """Apply gated GELU (Shazeer 2020): [..., 2 f], with gate and value of each feature adjacent, -> [..., f]."""
    return _Gated.apply(x, GATED_GELU)  # type: ignore[no-untyped-call,no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """Apply SwiGLU, whose gate is x sigmoid(x): [..., 2 f], gate and value of each feature adjacent, -> [..., f]."""
    return _Gated.apply(x, SWIGLU)  # type: ignore[no-untyped-call,no-any-return]


GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gated-gelu": gated_gelu, "swiglu": swiglu}
UNFUSED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gated-gelu": GATED_GELU.plain, "swiglu": SWIGLU.plain}

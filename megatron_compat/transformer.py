"""Building blocks that CPM-Pretrain's tutorial uses: `MegatronModule`, `ParallelMLP` and their helper functions."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron import mpu
from megatron.model.block import ParallelMLP as _ParallelMLP
from megatron.mpu import LayerNorm
from megatron.training.global_vars import get_args


class MegatronModule(nn.Module):
    """Base class of CPM-Pretrain's modules: a torch module with `state_dict_for_save_checkpoint`."""

    def state_dict_for_save_checkpoint(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return `state_dict()` of this module with the same arguments."""
        state: dict[str, Any] = self.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return state


class ParallelMLP(MegatronModule):
    """MLP of a transformer block; `get_args()` sets its sizes. A call returns (output, bias).

    init_method, output_layer_init_method: functions that fill the first and the second weight in place, by default
    from a normal distribution with standard deviation --init-method-std.
    """

    def __init__(self, init_method: Any = None, output_layer_init_method: Any = None) -> None:
        super().__init__()
        model = get_args().config.model
        # Attention and MLP of each layer both add to the hidden states, so there are 2 x num_layers additions.
        output_std = model.output_std(2 * model.num_layers, model.ff_growth)
        inner = _ParallelMLP(model, output_std)
        # Not a submodule, so that the weights have CPM-Pretrain's names, such as dense_h_to_4h.weight.
        self.dense_h_to_4h = inner.dense_h_to_4h
        self.dense_4h_to_h = inner.dense_4h_to_h
        self._forward = inner.forward
        # Without a function of its own, a weight keeps the initialisation of this project.
        for layer, init in ((self.dense_h_to_4h, init_method), (self.dense_4h_to_h, output_layer_init_method)):
            if init is not None:
                spec = mpu.spec_of(layer.weight)
                mpu.declare(layer.weight, init, dim=spec.dim, full_size=spec.full_size, axis=layer.axis)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the MLP: [s, b, h] -> ([s, b, h], bias [h], which the caller must add)."""
        return self._forward(hidden_states)


def init_method_normal(sigma: float) -> mpu.InitMethod:
    """Return a function that fills a weight with normal values of mean 0 and standard deviation `sigma`."""
    return mpu.normal(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> mpu.InitMethod:
    """Return a function that fills a weight with normal values of standard deviation sigma / sqrt(2 * num_layers).

    This is GPT-2's initialisation of output projections (Radford et al. 2019).
    """
    return mpu.normal(sigma / math.sqrt(2.0 * num_layers))


def openai_gelu(x: Tensor) -> Tensor:
    """Apply GELU in its tanh form: [...] -> [...]."""
    return F.gelu(x, approximate="tanh")


gelu_impl = openai_gelu


def erf_gelu(x: Tensor) -> Tensor:
    """Apply GELU in its exact form, by erf: [...] -> [...]."""
    return F.gelu(x)


def get_linear_layer(rows: int, columns: int, init_method: Any) -> nn.Linear:
    """Return a linear layer from `rows` to `columns` features whose weight `init_method` fills; its bias is zero."""
    layer = nn.Linear(rows, columns)
    with torch.no_grad():
        init_method(layer.weight)
        layer.bias.zero_()
    return layer


def get_params_for_weight_decay_optimization(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two parameter groups: matrices, with weight decay, and biases and norm weights, without weight decay."""
    vectors = [p for p in module.parameters() if p.dim() < 2]
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    return {"params": matrices}, {"params": vectors, "weight_decay": 0.0}


__all__ = [
    "LayerNorm", "MegatronModule", "ParallelMLP", "erf_gelu", "gelu_impl", "get_linear_layer",
    "get_params_for_weight_decay_optimization", "init_method_normal", "openai_gelu", "scaled_init_method_normal",
]  # fmt: skip

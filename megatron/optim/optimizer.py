"""Optimizer: AdamW (Loshchilov and Hutter 2019) or SGD, with weight decay only on matrices."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from megatron.config import OptimConfig
from megatron.kernels import adamw
from megatron.mpu import spec_of


def parameter_groups(
    module: nn.Module, weight_decay: float, spared: Collection[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices, with weight decay, and one-dimensional weights, without weight decay.

    One-dimensional weights are biases and the weights of norms. spared: matrices that also get no weight decay.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    spared = set(spared)
    groups = [
        {"params": [p for p in parameters if _is_matrix(p) and p not in spared], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not _is_matrix(p) or p in spared], "weight_decay": 0.0},
    ]
    # A pipeline stage may have no parameters, but torch's optimizers need at least one.
    return [group for group in groups if group["params"]] or [{"params": [nn.Parameter(torch.zeros(1))]}]


def _is_matrix(parameter: nn.Parameter) -> bool:
    return len(spec_of(parameter).local_shape) > 1  # parameter.shape is wrong here: ZeRO 3 replaces it


def build_optimizer(
    module: nn.Module, config: OptimConfig, kernels: str = "torch", spared: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of --optimizer: AdamW, or SGD with momentum.

    kernels: the value of --kernels. spared: matrices to which weight decay is not applied.
    """
    groups = parameter_groups(module, config.weight_decay, spared)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)
    return adamw(groups, kernels, lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)

"""Optimizer: AdamW (Loshchilov and Hutter 2019), SGD or Muon, with weight decay only on matrices."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.config import OptimConfig
from megatron.kernels import adamw
from megatron.mpu import spec_of

from .muon import Muon


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
    module: nn.Module,
    config: OptimConfig,
    kernels: str = "torch",
    spared: Collection[nn.Parameter] = (),
    hidden: Collection[nn.Parameter] = (),
    ns_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of --optimizer: AdamW, SGD with momentum, or Muon.

    kernels: the value of --kernels. spared: matrices to which weight decay is not applied. hidden: matrices that Muon
    orthogonalises. ns_dtype: dtype in which it does so; None: that of the weights.
    """
    groups = parameter_groups(module, config.weight_decay, spared)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)
    betas = config.adam_beta1, config.adam_beta2
    adam = partial(adamw, kernels=kernels, lr=config.lr, betas=betas, eps=config.adam_eps)
    return Muon(groups, hidden, config, adam, ns_dtype) if config.optimizer == "muon" else adam(groups)

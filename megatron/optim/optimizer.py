"""Optimizer: AdamW (Loshchilov and Hutter 2019), SGD or Muon, with weight decay only on matrices."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config import OptimConfig
from megatron.config.param_groups import ParamRule
from megatron.kernels import apex_class
from megatron.mpu import spec_of


class GroupKey(NamedTuple):
    """Settings that the weights of a parameter group have in common. An optimizer's groups are sorted by them.

    no_decay: True for the weights to which --weight-decay does not apply: vectors and chosen matrices.
    lag: by how many steps their step count is lower than that of the other groups, because they were frozen.
    """

    no_decay: bool
    lr_factor: float
    weight_decay: float
    lag: int = 0


def group_keys(
    module: nn.Module,
    config: OptimConfig,
    undecayed_matrices: Collection[nn.Parameter] = (),
    rules: Mapping[nn.Parameter, ParamRule] | None = None,
    factors: Mapping[nn.Parameter, float] | None = None,
    lags: Mapping[nn.Parameter, int] | None = None,
) -> dict[nn.Parameter, GroupKey]:
    """Return the parameter group of each trained weight of `module`.

    Matrices get --weight-decay. One-dimensional weights, which are biases and the weights of norms, get none.
    undecayed_matrices: matrices that also get no weight decay. rules: settings of --param-groups for single weights.
    factors: muP's factors of the learning rate. They divide the weight decay, so that the product stays unchanged, as
    weights shrink by the learning rate times the weight decay in each step. lags: see `GroupKey`; 0 by default.
    """
    undecayed_matrices = set(undecayed_matrices)
    rules = rules or {}
    factors = factors or {}
    lags = lags or {}
    keys = {}
    for p in module.parameters():
        if not p.requires_grad:
            continue
        no_decay = not _is_matrix(p) or p in undecayed_matrices
        decay = 0.0 if no_decay else config.weight_decay
        lr_factor = 1.0
        rule = rules.get(p, ParamRule("*"))  # by default a rule without settings
        if rule.weight_decay is not None:
            decay = rule.weight_decay
        if rule.lr_factor is not None:
            lr_factor = rule.lr_factor
        mup_factor = factors.get(p, 1.0)
        keys[p] = GroupKey(no_decay, lr_factor * mup_factor, decay / mup_factor, lags.get(p, 0))
    return keys


def _is_matrix(parameter: nn.Parameter) -> bool:
    return len(spec_of(parameter).local_shape) > 1  # parameter.shape is wrong here: ZeRO 3 replaces it


def build_optimizer(
    keys: Mapping[nn.Parameter, GroupKey],
    config: OptimConfig,
    kernels: str = "torch",
    hidden: Collection[nn.Parameter] = (),
    ns_dtype: torch.dtype | None = None,
    width: float = 1.0,
) -> torch.optim.Optimizer:
    """Build the optimizer of --optimizer: AdamW, SGD with momentum, or Muon.

    keys: the weights to train and the group of each; `lr_factor` of a group multiplies the learning rate of each step.
    kernels: the value of --kernels. hidden: matrices that Muon orthogonalises. ns_dtype: dtype in which it does so;
    None: that of the weights. width: width of the model over the width of muP's base model. It divides Adam's epsilon,
    as it divides the gradients of all weights.
    """
    groups: list[dict[str, Any]] = []
    for key in sorted(set(keys.values())):
        members = [p for p in keys if keys[p] == key]
        groups.append({"params": members, "weight_decay": key.weight_decay, "lr_factor": key.lr_factor})
    if not groups:  # A pipeline stage may have no parameters, but torch's optimizers need at least one.
        groups.append({"params": [nn.Parameter(torch.zeros(1))]})
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)
    betas = config.adam_beta1, config.adam_beta2
    settings: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.adam_eps / width}
    fused = apex_class(kernels, "optimizers", "FusedAdam")
    if fused is None:
        # fused=True makes one pass over memory: 4x faster on a CPU than the default, as fast as DeepSpeed's compiled
        # Adam.
        adam: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True, **settings)
    else:
        adam = partial(fused, adam_w_mode=True, **settings)
    if config.optimizer == "muon":
        from .muon import Muon

        return Muon(groups, hidden, config, adam, ns_dtype)
    return adam(groups)

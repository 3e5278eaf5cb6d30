"""Optimizer: AdamW (Loshchilov and Hutter 2019), SGD or Muon, with weight decay only on matrices.

The learning rate is a pure function of the iteration or of the consumed samples: there is no state to save or restore.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.config import Config, OptimConfig
from megatron.config.optim import floor_share
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
    rules: Mapping[nn.Parameter, ParamRule] = {},
    factors: Mapping[nn.Parameter, float] = {},
    lags: Mapping[nn.Parameter, int] = {},
) -> dict[nn.Parameter, GroupKey]:
    """Return the parameter group of each trained weight of `module`.

    Matrices get --weight-decay. One-dimensional weights, which are biases and the weights of norms, get none.
    undecayed_matrices: matrices that also get no weight decay. rules: settings of --param-groups for single weights.
    factors: muP's factors of the learning rate. They divide the weight decay, so that the product stays unchanged, as
    weights shrink by the learning rate times the weight decay in each step. lags: see `GroupKey`; 0 by default.
    """
    undecayed_matrices = set(undecayed_matrices)
    keys = {}
    for p in module.parameters():
        if not p.requires_grad:
            continue
        is_matrix = len(spec_of(p).local_shape) > 1  # p.shape is wrong here: ZeRO 3 replaces it
        no_decay = not is_matrix or p in undecayed_matrices
        decay = 0.0 if no_decay else config.weight_decay
        lr_factor = 1.0
        rule = rules.get(p, ParamRule("*"))  # by default a rule that sets nothing
        if rule.weight_decay is not None:
            decay = rule.weight_decay
        if rule.lr_factor is not None:
            lr_factor = rule.lr_factor
        mup_factor = factors.get(p, 1.0)  # 1 without muP
        keys[p] = GroupKey(no_decay, lr_factor * mup_factor, decay / mup_factor, lags.get(p, 0))
    return keys


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
    adam = _adam_builder(config, kernels, width)
    if config.optimizer == "muon":
        from .muon import Muon

        return Muon(groups, hidden, config, adam, ns_dtype)
    return adam(groups)


def _adam_builder(config: OptimConfig, kernels: str, width: float) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that builds an AdamW for parameter groups; see `build_optimizer`."""
    betas = config.adam_beta1, config.adam_beta2
    settings: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.adam_eps / width}
    if config.rounded_moments:
        from .rounded_adamw import RoundedAdamW

        return partial(RoundedAdamW, moment_dtypes=dict.fromkeys(config.rounded_moments, torch.bfloat16), **settings)
    apex_adam = apex_class(kernels, "optimizers", "FusedAdam")
    if apex_adam is None:
        # fused=True makes one pass over memory: on a CPU, 4x faster than the default, as fast as DeepSpeed's Adam.
        return partial(torch.optim.AdamW, fused=True, **settings)
    return partial(apex_adam, adam_w_mode=True, **settings)  # the mode is AdamW, not Adam with an L2 penalty


def lr_at(iteration: int, config: Config, samples: tuple[int, int] | None = None) -> float:
    """Return the learning rate of optimizer step `iteration`, counted from 0.

    The learning rate rises linearly to --lr over the warm-up and then decays. In the last step of the decay it is
    exactly --min-lr. With --lr-decay-style constant, it stays at --lr. With wsd, it stays at --lr until the decay at
    the end (Hu et al. 2024).
    samples: number of samples consumed after the step, and after the next step. Required if the learning rate follows
    the consumed samples, that is, with --lr-decay-samples or --train-samples.
    """
    optim = config.optim
    total = decay_end(config)
    completed = iteration + 1  # after this step, in the unit of `decay_end`: iterations, or samples below
    next_completed = iteration + 2  # after the next step
    if config.lr_decay_samples is not None:
        if samples is None:
            raise ValueError("the learning rate follows samples: give lr_at the samples of the step")
        completed, next_completed = samples
    warmup = floor_share(optim.warmup, total)
    if completed <= warmup:  # never without a warm-up, because `completed` is at least 1
        return optim.lr * completed / warmup
    style = optim.lr_decay_style
    if style == "constant":
        return optim.lr
    if next_completed > total:
        completed = total  # the next step would end after the decay, so the decay ends with this step
    decay_begin = warmup
    if style == "wsd":
        decay_begin = max(total - wsd_decay_length(config), warmup)
        style = optim.lr_wsd_decay_style
    decay_length = max(total - decay_begin, 1)  # at least 1, as it is a divisor
    done_fraction = max(completed - decay_begin, 0) / decay_length
    return optim.min_lr + (optim.lr - optim.min_lr) * REMAINING[style](done_fraction)


# Shape of the decay -> function from the completed fraction of the decay to the remaining fraction of lr - min_lr.
REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "minus-sqrt": lambda done: 1 - math.sqrt(done),
    "exponential": lambda done: 2 * 0.5**done - 1,
}


def decay_end(config: Config) -> int:
    """Return the end of the learning-rate decay, in samples if the learning rate follows them, else in iterations."""
    return config.lr_decay_iters if config.lr_decay_samples is None else config.lr_decay_samples


def wsd_decay_length(config: Config) -> int:
    """Return the length of the decay at the end of --lr-decay-style wsd, in the unit of `decay_end`."""
    optim = config.optim
    chosen = optim.lr_wsd_decay_iters if config.lr_decay_samples is None else optim.lr_wsd_decay_samples
    return chosen or max(decay_end(config) // 10, 1)  # by default, the decay is the last tenth

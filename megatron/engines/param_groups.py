"""Parameter groups of a run: --param-groups applied to the whole model, over all pipeline stages."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import tds

from .. import mpu
from ..config import Config
from ..config.ds_config import Resolved
from ..config.param_groups import ParamRule, match_rules
from ..model.embedding import embedding_weights, layer_lr_factors
from ..model.layers import PLACEHOLDER, global_parameters
from ..optim import GroupKey, group_keys
from ..ranks.objects import gather_objects


def rules_of(model: nn.Module, rules: Sequence[ParamRule]) -> dict[nn.Parameter, ParamRule]:
    """Return the rule of each weight of this stage that has one."""
    parameters = dict(global_parameters(model))
    return {parameters[name]: rule for name, rule in match_rules(rules, parameters).items()}


def keys_of_groups(
    model: nn.Module, config: Config, resolved: Resolved, lags: Mapping[str, int]
) -> dict[nn.Parameter, GroupKey]:
    """Return the parameter group of each weight to train on this stage.

    DeepSpeed's ZeRO needs weights of each group on each pipeline stage. Where --param-groups or muP leaves a stage
    without weights of a group, the stage gets a placeholder, which has no gradient. All ranks must call this.
    lags: by how many steps the step counts of weights, by name, are lower than the optimizer's; see `step_lags`.
    """
    spared = () if config.optim.embedding_weight_decay else embedding_weights(model)
    factors = layer_lr_factors(model, config.model, config.optim.muon_scale)
    behind = {p: lags[name] for name, p in global_parameters(model) if name in lags}
    keys = group_keys(model, config.optim, spared, rules_of(model, resolved.param_rules), factors, behind)
    needs_all = tds.pipe.is_pipeline(model) and resolved.zero_stage and not resolved.distributed_optimizer
    if (resolved.param_rules or config.model.mup_base_hidden_size or lags) and needs_all:
        stages = gather_objects(set(keys.values()), mpu.get_mesh().pipe)
        for at, key in enumerate(sorted(set().union(*stages) - set(keys.values()))):
            placeholder = nn.Parameter(torch.zeros(1))
            model.register_parameter(f"{PLACEHOLDER}{at}", placeholder)
            keys[placeholder] = key
    return keys

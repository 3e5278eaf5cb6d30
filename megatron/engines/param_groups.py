"""Parameter groups of a run: --param-groups and Muon applied to the whole model, over all pipeline stages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import tds

from .. import mpu
from ..config import Config
from ..config.ds_config import Resolved
from ..config.param_groups import ParamRule, match_rules
from ..model.layers import PLACEHOLDER, global_parameters
from ..optim import GroupKey, group_keys
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.objects import gather_objects

# --muon-ns-dtype -> dtype of the Newton-Schulz iterations; None: that of the weights.
NS_DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def match_param_rules(model: nn.Module, rules: Sequence[ParamRule]) -> dict[nn.Parameter, ParamRule]:
    """Return the rule of each weight of this stage that has one."""
    parameters = dict(global_parameters(model))
    return {parameters[name]: rule for name, rule in match_rules(rules, parameters).items()}


def assign_groups(
    model: nn.Module, config: Config, resolved: Resolved, lags: Mapping[str, int]
) -> dict[nn.Parameter, GroupKey]:
    """Return the parameter group of each weight to train on this stage.

    DeepSpeed's ZeRO needs weights of each group on each pipeline stage. Where --param-groups or muP leaves a stage
    without weights of a group, the stage gets a placeholder, which has no gradient. All ranks must call this.
    lags: by how many steps the step counts of weights, by name, are lower than the optimizer's; see `step_lags`.
    """
    no_decay = set()
    if not config.optim.embedding_weight_decay:
        from ..model.muon_parameters import embedding_weights

        no_decay = embedding_weights(model)
    factors = {}
    if config.model.mup_base_hidden_size is not None:
        from ..model.lr_factors import layer_lr_factors

        factors = layer_lr_factors(model, config.model, config.optim.muon_scale)
    step_lags = {p: lags[name] for name, p in global_parameters(model) if name in lags}
    rules = match_param_rules(model, resolved.param_rules)
    keys = group_keys(model, config.optim, no_decay, rules, factors, step_lags)
    uses_deepspeed_zero = resolved.zero_stage and not resolved.distributed_optimizer
    # Without these settings, there are only two groups, matrices and vectors, which every stage has.
    groups_may_differ = resolved.param_rules or config.model.mup_base_hidden_size or lags
    if uses_deepspeed_zero and groups_may_differ and tds.pipe.is_pipeline(model):
        _add_placeholders(model, keys)
    return keys


def _add_placeholders(model: nn.Module, keys: dict[nn.Parameter, GroupKey]) -> None:
    """Add a placeholder to `model` and `keys` for each group of which only other stages have weights."""
    own_keys = set(keys.values())
    keys_by_stage = gather_objects(own_keys, mpu.get_mesh().pipe)
    missing = set().union(*keys_by_stage) - own_keys  # those of other stages only
    # Sorted, as the order of a set may differ between the ranks of a stage, which must agree on the names.
    for index, key in enumerate(sorted(missing)):
        placeholder = nn.Parameter(torch.zeros(1))
        model.register_parameter(f"{PLACEHOLDER}{index}", placeholder)
        keys[placeholder] = key


def muon_settings(model: nn.Module, config: Config, resolved: Resolved) -> dict[str, Any]:
    """Return the arguments of `build_optimizer` that only Muon needs. Raises RunError if it has no matrix."""
    from ..model.muon_parameters import muon_parameters

    matrices = muon_parameters(model)
    # A pipeline stage without transformer layers has no such matrix, so it is enough that some rank has one.
    any_rank_has = any(gather_objects(bool(matrices)))
    with raise_on_all_ranks():
        if not any_rank_has:
            raise ValueError(
                "--optimizer muon: no matrix is trained in a transformer layer of megatron.model; set use_muon = True "
                "on the weights that are hidden matrices, or use --optimizer adam"
            )
    name = config.optim.muon_ns_dtype
    # The weights that the optimizer steps may be fp32 copies, so "auto" names bf16 for a bf16 run.
    if name == "auto" and resolved.precision == "bf16":
        name = "bf16"
    return {"hidden": matrices, "ns_dtype": NS_DTYPES[name]}

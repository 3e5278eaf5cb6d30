"""Weights that only some replicas hold, as the experts of a mixture with expert parallelism.

The attribute `replica_group` of such a weight is the process group of the replicas that hold it. DeepSpeed marks the
experts of its `MoE` by `allreduce = False` and the name of this group. Gradients of the weight are summed over this
group only. Other weights are held by all replicas.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .clip import local_squared_norm


def holder_group(parameter: nn.Parameter, replicas: Any) -> Any:
    """Return the process group of the replicas that hold `parameter`; `replicas` is the group of all replicas."""
    if not getattr(parameter, "allreduce", True):
        from deepspeed.utils.groups import _get_expert_data_parallel_group

        return _get_expert_data_parallel_group(parameter.group_name)  # type: ignore[attr-defined]
    return getattr(parameter, "replica_group", replicas)


def is_first_holder(parameter: nn.Parameter, first_replica: bool) -> bool:
    """Return whether this rank is the first replica that holds `parameter`. first_replica: whether it is the first."""
    group = holder_group(parameter, None)
    return first_replica if group is None else dist.get_rank(group) == 0


def group_by_holders(parameters: Iterable[nn.Parameter], replicas: Any) -> list[tuple[Any, list[nn.Parameter]]]:
    """Return the process groups of `holder_group`, each with its parameters in order; first that of all replicas."""
    by_group: dict[Any, list[nn.Parameter]] = {replicas: []}
    for parameter in parameters:
        by_group.setdefault(holder_group(parameter, replicas), []).append(parameter)
    return list(by_group.items())


def replica_squared_norm(
    parameters: Iterable[nn.Parameter], model_rank: int, device: torch.device, replicas: Any
) -> Tensor:
    """Return this rank's part of the squared gradient norm of a replica, a scalar in fp64; see `local_squared_norm`.

    Weights that only some replicas hold count once. Collective over `replicas` if there are such weights.
    """
    groups = group_by_holders(parameters, replicas)
    _, common_weights = groups.pop(0)  # held by all replicas
    total = local_squared_norm(common_weights, model_rank, device)
    if groups:
        # Each holder of a weight adds the same norm in the all-reduce, so divide by their number. For example, a weight
        # with a squared norm of 6 on 2 of 4 replicas: 3 + 3 from its holders.
        norms = [local_squared_norm(own, model_rank, device) / dist.get_world_size(group) for group, own in groups]
        partial_sum = torch.stack(norms).sum()
        dist.all_reduce(partial_sum, group=replicas)
        total += partial_sum
    return total

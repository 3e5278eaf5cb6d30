"""Weights that only some replicas hold, as the experts of a mixture with expert parallelism.

The attribute `replica_group` of such a weight is the process group of the replicas that hold it. Gradients of the
weight are summed over this group only. Other weights are held by all replicas.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .clip import squared_norm_here


def holders_of(parameter: nn.Parameter, replicas: Any) -> Any:
    """Return the process group of the replicas that hold `parameter`; `replicas` is the group of all replicas."""
    return getattr(parameter, "replica_group", replicas)


def is_first_holder(parameter: nn.Parameter, first_replica: bool) -> bool:
    """Return whether this rank is the first replica that holds `parameter`. first_replica: whether it is the first."""
    group = holders_of(parameter, None)
    return first_replica if group is None else dist.get_rank(group) == 0


def by_holders(parameters: Iterable[nn.Parameter], replicas: Any) -> list[tuple[Any, list[nn.Parameter]]]:
    """Return the process groups of `holders_of`, each with its parameters in order; first that of all replicas."""
    found: dict[Any, list[nn.Parameter]] = {replicas: []}
    for parameter in parameters:
        found.setdefault(holders_of(parameter, replicas), []).append(parameter)
    return list(found.items())


def squared_norm_of_replica(
    parameters: Iterable[nn.Parameter], model_rank: int, device: torch.device, replicas: Any
) -> Tensor:
    """Return this rank's part of the squared gradient norm of a replica, a scalar in fp64; see `squared_norm_here`.

    Weights that only some replicas hold count once. Collective over `replicas` if there are such weights.
    """
    (_, common), *others = by_holders(parameters, replicas)
    total = squared_norm_here(common, model_rank, device)
    if others:
        parts = [squared_norm_here(own, model_rank, device) / dist.get_world_size(group) for group, own in others]
        held = torch.stack(parts).sum()
        dist.all_reduce(held, group=replicas)
        total += held
    return total

"""Exchange of losses by name, in a step that has a loss which the last step did not have."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import gather_objects


def exchange_means(losses: Any, divisors: Mapping[int, float]) -> dict[Any, Tensor]:
    """Return the losses of all replicas, which the last stages exchange by name and send to the other stages.

    losses: the `Losses` of this rank. divisors: for each kind of loss, the divisor of its sum.
    """
    # Only last stages have added losses. The broadcast replaces the empty dict of the other stages.
    local_means = _means_by_name(losses, divisors) if losses._sums else {}
    payload = [local_means]
    if dist.get_world_size(losses._stages) > 1:
        dist.broadcast_object_list(payload, losses._source, group=losses._stages)
    means = {}
    for key, mean in payload[0].items():
        means[key] = torch.tensor(mean, dtype=torch.float64, device=losses.device)
    return means


def _means_by_name(losses: Any, divisors: Mapping[int, float]) -> dict[Any, float]:
    """Return the mean of each loss over all replicas, trained losses first. Collective over the replicas.

    A key is (kind, name), where kind 0 is that of trained losses, e.g. (0, "lm").
    """
    local_sums = {key: total.item() for key, total in losses._sums.items()}
    totals = Counter[Any]()
    for replica_sums in gather_objects(local_sums, losses._replicas):
        totals.update(replica_sums)
    means = {}
    for kind, name in sorted(totals, key=lambda key: key[0]):
        means[kind, name] = totals[kind, name] / divisors[kind]
    return means

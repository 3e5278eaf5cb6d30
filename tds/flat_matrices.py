"""Memory layout of a bucket whose weights are stepped as wholes: each replica owns some weights, with balanced work."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

ALIGNMENT = 64  # elements; shares begin at multiples of this, because copies from aligned addresses are fast
MOST_PADDING = 1 / 8  # a bucket of whole weights gets more weights until its padding is at most this fraction

Work = Callable[[nn.Parameter], float | None]


def balance(work: Sequence[float], replicas: int) -> list[list[int]]:
    """Distribute the indices of `work` over the replicas: the largest first, each to the replica with least work.

    For example, work [3, 5, 3] on 2 replicas gives [[1], [0, 2]]: the loads are 5 and 6.
    The result depends on the arguments only, so all replicas get the same one (Graham 1969).
    """
    loads = [0.0] * replicas
    owned = [list[int]() for _ in range(replicas)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        replica = loads.index(min(loads))
        owned[replica].append(index)
        loads[replica] += work[index]
    return owned


def place_weights(
    parameters: Sequence[nn.Parameter], replicas: int, work: Work | None
) -> tuple[list[nn.Parameter], int]:
    """Return (the parameters in the order of memory, the elements of each replica's share).

    work: function that returns the work of stepping a weight; each replica then steps whole weights, so its share
    begins with a weight. None: shares may begin and end anywhere in a weight.
    The first list also holds placeholders: parameters on the meta device for memory that belongs to no weight.
    """
    # For example, weights of 100, 60 and 40 elements on 2 replicas. With work = elements, replica 0 owns the first
    # weight, replica 1 the others, and a share has 128 elements, so placeholders of 28 elements follow both. With
    # work = None, a share has 128 elements, too, and one placeholder of 56 elements follows all weights.
    if work is None:  # one group of weights fills the shares of all replicas
        groups = [list(parameters)]
        share = round_up(-(-_total_numel(parameters) // replicas))  # -(-a // b) is a / b, rounded up
        group_size = share * replicas
    else:  # one group for each replica
        groups = []
        costs = [work(p) or 0 for p in parameters]
        for indices in balance(costs, replicas):
            groups.append([parameters[index] for index in indices])
        share = round_up(max(map(_total_numel, groups)))
        group_size = share
    ordered = list[nn.Parameter]()
    for weights in groups:
        ordered += weights
        if gap := group_size - _total_numel(weights):
            ordered.append(nn.Parameter(torch.empty(gap, device="meta")))
    return ordered, share


def _total_numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def round_up(count: int) -> int:
    """Return `count` rounded up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT  # -(-a // b) is a / b, rounded up


def has_little_padding(parameters: Sequence[nn.Parameter], replicas: int, work: Work) -> bool:
    """Return whether a bucket of these weights, each stepped as a whole, has little padding."""
    _, share = place_weights(parameters, replicas, work)
    return share * replicas <= (1 + MOST_PADDING) * _total_numel(parameters)

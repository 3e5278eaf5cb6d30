"""Memory layout of a bucket whose weights are stepped as wholes: each replica owns some weights, with balanced work."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

ALIGNMENT = 64  # elements; shares begin at multiples of this, because copies from aligned addresses are fast
MOST_PADDING = 1 / 8  # a bucket of whole weights gets more weights until its padding is at most this fraction

Work = Callable[[nn.Parameter], float | None]


def balance(work: Sequence[float], replicas: int) -> list[list[int]]:
    """Distribute the indices of `work` over the replicas: the largest first, each to the replica with least work.

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

    The first list also holds placeholders: parameters on the meta device for memory that belongs to no weight. work:
    work of stepping a weight, if a replica must step whole weights. Each share then begins with a weight and may end
    with a placeholder. None: shares may begin and end anywhere in a weight.
    """
    # For example, weights of 100, 60 and 40 elements on 2 replicas: with work = elements, replica 0 owns the first
    # weight, replica 1 the others, and a share has 128 elements, so placeholders of 28 elements follow both.
    if work is None:
        owned = [list(parameters)]
        share = round_up(-(-_total_numel(parameters) // replicas))
        length = share * replicas
    else:
        owned = []
        costs = [work(p) or 0 for p in parameters]
        for indices in balance(costs, replicas):
            owned.append([parameters[index] for index in indices])
        share = round_up(max(map(_total_numel, owned)))
        length = share
    ordered = list[nn.Parameter]()
    for weights in owned:
        ordered += weights
        if gap := length - _total_numel(weights):
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

"""Which rank the others wait for: found by the time that each spends on its own work, as all iterations last equally long."""

import statistics
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import mpu

FACTOR = 1.5  # of the median
SHARE = 0.1  # of an iteration; less is not worth a word


class Straggler(NamedTuple):
    """A rank, and how many times as long as the median rank it works."""

    rank: int
    factor: float


def straggler(seconds: float, iteration: float, device: torch.device) -> Straggler | None:
    """The slowest rank of the last interval, if it is far behind the others. A collective; all ranks get the same answer.

    seconds: of an iteration, that this rank read data and computed; iteration: how long one lasts. A rank is compared with
    those of its pipeline stage, as stages differ by their layers, or with all where it has the stage for itself and
    there are more than two.
    """
    world, mesh = dist.get_world_size(), mpu.get_mesh()
    if world == 1:
        return None
    mine = torch.tensor([seconds, iteration, float(mesh.pipe.rank)], dtype=torch.float64, device=device)
    found = torch.empty(world * len(mine), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(found, mine)
    every = found.view(world, -1).tolist()
    return slowest([(s, int(stage)) for s, _, stage in every], max(i for _, i, _ in every))


def slowest(every: list[tuple[float, int]], iteration: float) -> Straggler | None:
    """every: (seconds, stage) by rank."""
    peers: defaultdict[int, list[float]] = defaultdict(list)
    for seconds, stage in every:
        peers[stage].append(seconds)
    if len(every) == len(peers) > 2:  # of two, the slower one is only the stage with more layers
        peers = defaultdict(lambda: [seconds for seconds, _ in every])
    found = []
    for rank, (seconds, stage) in enumerate(every):
        median = statistics.median_low(peers[stage])
        if median > 0 and seconds > FACTOR * median and seconds - median > SHARE * iteration:
            found.append(Straggler(rank, seconds / median))
    return max(found, key=lambda each: each.factor, default=None)

"""Detection of a straggler: the rank that spends the most time on its own work.

Iterations take equally long on all ranks, as ranks wait for each other. Only the time that a rank works, without
waiting, shows which rank is slow.
"""

import statistics
from collections import defaultdict
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import mpu

# A straggler's time exceeds its peers' median by the factor FACTOR, and also by SHARE of the iteration's time.
FACTOR = 1.5
SHARE = 0.1


class Straggler(NamedTuple):
    """A rank, and its working time as a multiple of the median of its peers."""

    rank: int
    factor: float


def straggler(seconds: float, iteration: float, device: torch.device) -> Straggler | None:
    """Return the slowest rank of the last interval if it is far slower than its peers, else None. A collective.

    All ranks get the same answer. A rank's peers are the ranks of its pipeline stage, as stages differ in their
    layers. If there are more than two stages of one rank each, a rank's peers are all ranks.
    seconds: time per iteration in which this rank read data and computed.
    iteration: duration of an iteration in seconds.
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
    """Return the rank that exceeds the median of its peers by the largest factor; None if no rank is a straggler.

    every: (seconds, stage) by rank.
    """
    peers: defaultdict[int, list[float]] = defaultdict(list)
    for seconds, stage in every:
        peers[stage].append(seconds)
    if len(every) == len(peers) > 2:  # the slower of two stages may just have more layers
        peers = defaultdict(lambda: [seconds for seconds, _ in every])
    found = []
    for rank, (seconds, stage) in enumerate(every):
        median = statistics.median_low(peers[stage])
        if median > 0 and seconds > FACTOR * median and seconds - median > SHARE * iteration:
            found.append(Straggler(rank, seconds / median))
    return max(found, key=lambda each: each.factor, default=None)

"""Detection of a straggler: a rank that works much longer than its peers.

Iterations take equally long on all ranks, as ranks wait for each other. A rank's working time, which excludes
waiting, shows whether the rank is slow.
"""

import statistics
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import mpu
from ..training.feature import Feature, Interval
from ..training.run_state import Run

# A straggler's working time exceeds MIN_FACTOR times the median of its peers, and exceeds this median by more than
# MIN_SHARE of the iteration time.
MIN_FACTOR = 1.5
MIN_SHARE = 0.1


class Straggler(NamedTuple):
    """A slow rank, and its working time as a multiple of its peers' median."""

    rank: int
    factor: float


class Stragglers(Feature):
    """Feature that names the slowest rank in a row if it is much slower than its peers."""

    def start(self, run: Run) -> None:
        self._run = run

    def row(self, interval: Interval) -> dict[str, Any]:
        """Return the slowest rank of the interval if it is much slower than its peers. All ranks must call this."""
        # Seconds per iteration in which this rank read data and computed.
        busy = self._run.engine.busy(interval.timed) / max(interval.iterations, 1)
        world = dist.get_world_size()
        if world == 1:
            return {}
        stage = float(mpu.get_mesh().pipe.rank)
        own = torch.tensor([busy, interval.seconds, stage], dtype=torch.float64, device=self._run.device)
        gathered = own.repeat(world)  # the all-gather replaces its values
        dist.all_gather_into_tensor(gathered, own)
        # From [ranks, 3] to three lists with all ranks.
        times, iterations, stages = gathered.view(world, -1).t().tolist()
        all_ranks = list(zip(times, map(int, stages), strict=True))
        found = slowest_rank(all_ranks, max(iterations))
        return {"straggler": found._asdict()} if found else {}


def slowest_rank(all_ranks: list[tuple[float, int]], iteration: float) -> Straggler | None:
    """Return the straggler that exceeds the median of its peers by the largest factor; None without a straggler.

    A rank's peers are the ranks of its pipeline stage, as stages have different layers. If there are more than two
    stages of one rank each, a rank's peers are all ranks.
    all_ranks: (working time in seconds, pipeline stage) of each rank. iteration: duration of an iteration in seconds.
    """
    peer_times: dict[int, list[float]] = defaultdict(list)  # stage -> working times of its ranks
    for seconds, stage in all_ranks:
        peer_times[stage].append(seconds)
    # With one rank per stage, compare all ranks. Do not compare two stages: the slower one may just have more layers.
    if len(all_ranks) == len(peer_times) > 2:
        peer_times = dict.fromkeys(peer_times, [seconds for seconds, _ in all_ranks])
    # Of two peers, the lower median is the faster one. Compared with the mean, the slower one would seem less slow.
    medians = {stage: statistics.median_low(times) for stage, times in peer_times.items()}
    slow = []
    for rank, (seconds, stage) in enumerate(all_ranks):
        median = medians[stage]
        is_slow = seconds > MIN_FACTOR * median and seconds - median > MIN_SHARE * iteration
        if median > 0 and is_slow:  # peers that did not work have no factor
            slow.append(Straggler(rank, seconds / median))
    return max(slow, key=lambda straggler: straggler.factor, default=None)

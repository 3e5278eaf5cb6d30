"""Offsets of the ranks' clocks from rank 0's clock, with a proven error bound.

When the last rank enters a collective, no rank has left it yet. So, measured on one clock, the intervals
[enter, leave] of all ranks overlap. The offset d of a clock from rank 0's therefore satisfies
enter - leave_0 <= d <= leave - enter_0.
Several collectives narrow the bound. This works on any backend and world size.
"""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

ROUNDS = 12


def narrow(mine: Sequence[Sequence[int]], zeros: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return (offset, error bound) in ns. mine, zeros: (enter, leave) of each collective, on this rank and rank 0."""
    # For example, mine = [(105, 140)] and zeros = [(0, 30)]: the offset is 105 - 30 = 75 at least and 140 - 0 = 140 at
    # most, so it is 107.5 +- 32.5.
    low = -math.inf
    high = math.inf
    for (enter, leave), (enter_0, leave_0) in zip(mine, zeros, strict=True):
        low = max(low, enter - leave_0)
        high = min(high, leave - enter_0)
    return (low + high) / 2, (high - low) / 2


def distance(device: torch.device) -> tuple[int, float, float]:
    """Return (time of measurement, offset from rank 0, error bound) of this rank's clock in ns. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return time.perf_counter_ns(), 0.0, 0.0
    times = []
    one = torch.ones(1, device=device)
    for _ in range(ROUNDS):
        enter = time.perf_counter_ns()
        dist.all_reduce(one)
        one.fill_(1.0).item()  # item() makes the host wait until the all-reduce is done
        times.append((enter, time.perf_counter_ns()))
    mine = torch.tensor(times, dtype=torch.int64, device=device)
    zeros = mine.clone()
    dist.broadcast(zeros, 0)
    found = narrow(mine.tolist(), zeros.tolist())
    return (times[-1][1], 0.0, 0.0) if dist.get_rank() == 0 else (times[-1][1], *found)

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


def bound_offset(rank_times: Sequence[Sequence[int]], rank_0_times: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return (offset, error bound) in ns. Both arguments: (enter, leave) of each collective."""
    # For example, rank_times = [(105, 140)] and rank_0_times = [(0, 30)]: the offset is at least
    # 105 - 30 = 75 and at most 140 - 0 = 140, so it is 107.5 +- 32.5.
    low = -math.inf
    high = math.inf
    for (enter, leave), (enter_0, leave_0) in zip(rank_times, rank_0_times, strict=True):
        low = max(low, enter - leave_0)
        high = min(high, leave - enter_0)
    return (low + high) / 2, (high - low) / 2


def measure_offset(device: torch.device) -> tuple[int, float, float]:
    """Return (time of measurement, offset from rank 0, error bound) of this rank's clock in ns. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return time.perf_counter_ns(), 0.0, 0.0
    times = []
    ones = torch.ones(1, device=device)
    for _ in range(ROUNDS):
        enter = time.perf_counter_ns()
        dist.all_reduce(ones)
        ones.fill_(1.0).item()  # item() makes the host wait until the all-reduce is done
        times.append((enter, time.perf_counter_ns()))
    own_times = torch.tensor(times, dtype=torch.int64, device=device)
    rank_0_times = own_times.clone()
    dist.broadcast(rank_0_times, 0)
    measured_at = times[-1][1]
    if dist.get_rank() == 0:
        return measured_at, 0.0, 0.0  # its clock is the reference
    return measured_at, *bound_offset(own_times.tolist(), rank_0_times.tolist())

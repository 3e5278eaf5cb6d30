"""Process groups for large worlds: NCCL creates all groups of an axis in one split of the world's communicator.

torch usually creates one group at a time, by a collective over all ranks. A grid of pipe 16 x data 8 x model 8 has
hundreds of groups and thus, with NCCL, needs hundreds of collectives. A single call of `split_group` creates all groups
of an axis. On other backends, the groups are created one by one. megatron.mpu and DeepSpeed's grid share the groups, so
each group is created only once. The stage boundaries of a pipeline have separate groups (neighbours.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import deepspeed
from ._torch import can_split, new_local_group, urgent_options
from .queues import NEXT, PREVIOUS, boundary_parity

RankLists = Sequence[Sequence[int]]


@lru_cache(maxsize=1)  # a new world replaces the groups of the last one
def _groups_of(world: Any) -> dict[tuple[Any, ...], Any]:
    """Return the groups that this process has made in `world`; the caller adds to this dict, which begins empty."""
    return {}


def can_split_world() -> bool:
    """Return whether groups are split off the world's communicator.

    This is possible only if the world's process group was bound to a device when it was created.
    """
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    return device is not None and can_split(world, device)


def new_groups(rank_lists: RankLists, urgent: bool) -> Any:
    """Create disjoint groups and return this rank's group, or None. Collective over the world.

    rank_lists: the ranks of each group. urgent: whether the next computation waits for the messages of these groups. On
    NCCL they then run on a stream of high priority: a device starts their kernels ahead of others in the queue.
    """
    if can_split_world():
        world: Any = dist.group.WORLD
        options = urgent_options(world, world.bound_device_id) if urgent else None
        return dist.split_group(split_ranks=[list(ranks) for ranks in rank_lists], pg_options=options)
    own_group = None
    # torch's `new_group` is a collective over the world, so each rank calls it for the groups of other ranks, too.
    for ranks in rank_lists:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own_group = group
    return own_group


def shared_groups(rank_lists: RankLists, urgent: bool = False) -> Any:
    """Return `new_groups(rank_lists, urgent)`, but create each set of groups once, as its first caller wants it."""
    # Sorted, because callers may list the same groups in different orders.
    key = tuple(sorted(tuple(sorted(ranks)) for ranks in rank_lists))
    return _cached_groups(key, lambda: new_groups(key, urgent))


def member_group(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Return the group of these ranks, created at its first use. Collective over these ranks only.

    backend: by default that of the world.
    """
    return _cached_groups((backend, *ranks), lambda: _create_member_group(ranks, backend))


def host_group(group: Any) -> Any:
    """Return a group of the same ranks for tensors in host memory. Collective over the group.

    Numbers that the hosts know, such as shapes, are exchanged in this group, so that no host waits for its device.
    """
    if dist.get_backend(group) == "gloo":
        return group  # gloo sends from host memory
    return member_group(dist.get_process_group_ranks(group), "gloo")


def _create_member_group(ranks: Sequence[int], backend: str | None) -> Any:
    """Create a group of these ranks, in a call that only they make. backend: None is that of the world."""
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    # With a bound device, new_group would split the world's communicator, which all ranks must join.
    world.bound_device_id = None
    try:
        return new_local_group(ranks, backend)
    finally:
        world.bound_device_id = bound


def _cached_groups(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the result of `make()`, called once for this key in the current world."""
    groups = _groups_of(dist.group.WORLD)
    if key not in groups:
        groups[key] = make()
    return groups[key]


def max_with_nan(x: Tensor) -> Tensor:
    """Return the maximum of floats x [...] over the ranks, NaN where any rank has NaN. Collective.

    The MAX of gloo and of NCCL loses a NaN of another rank.
    """
    is_nan = x.isnan()
    without_nan = x.masked_fill(is_nan, -math.inf)
    maxima = torch.stack([without_nan, is_nan.to(x.dtype)])
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    maximum, any_nan = maxima.unbind()
    return maximum.masked_fill(any_nan > 0, math.nan)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return `value` of every rank of the group, in rank order. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def parallel_groups(members: Sequence[int], topology: Any) -> list[list[int]]:
    """Return all groups of the grid that vary along the same axes as the group `members`.

    members: the ranks of one group. topology: DeepSpeed's ProcessTopology, or an object with its methods.
    """
    # For example, members = [0, 1], the tensor-parallel ranks of stage 0 and replica 0 of a grid of 8 ranks: the groups
    # are [0, 1], [2, 3], [4, 5] and [6, 7], one for each stage and replica.
    coords = list(map(topology.get_coord, members))
    # The axes along which all members have one coordinate, and their ranges: in the example, pipe and data.
    fixed_axes = []
    ranges = []
    for axis in topology.get_axis_names():
        if len({getattr(coord, axis) for coord in coords}) == 1:
            fixed_axes.append(axis)
            ranges.append(range(topology.get_dim(axis)))
    groups = []
    for place in product(*ranges):  # one group: `members`, moved to this place along the fixed axes
        moved = dict(zip(fixed_axes, place, strict=True))
        ranks = []
        for coord in coords:
            ranks.append(topology.get_rank(**{**coord._asdict(), **moved}))
        groups.append(sorted(ranks))
    return groups


@contextmanager
def share_deepspeed_groups(topology: Callable[[], Any]) -> Iterator[None]:
    """Make DeepSpeed's grid get its groups from `shared_groups`, which creates all groups of an axis at once.

    topology: function that returns the grid's topology. The topology does not exist yet when the grid creates its first
    group, which contains all ranks.
    """
    original_new_group = deepspeed.comm.new_group
    group_of_ranks: dict[tuple[int, ...], Any] = {}  # ranks of each group of an axis -> this rank's group of the axis

    def new_group(ranks: Sequence[int]) -> Any:
        members = tuple(sorted(ranks))
        if members not in group_of_ranks:
            rank_lists = [members]  # the group of all ranks, parallel to no other
            if len(members) < dist.get_world_size():
                rank_lists = list(map(tuple, parallel_groups(members, topology())))
            # `shared_groups` returns the one group that this rank is in. All lists of the axis map to it, and the last
            # line returns it to its members only. For example, on rank 1, (0, 1) and (2, 3) both map to the group of
            # ranks 0 and 1, but new_group([2, 3]) returns None.
            group_of_ranks.update(dict.fromkeys(rank_lists, shared_groups(rank_lists)))
        return group_of_ranks[members] if dist.get_rank() in members else None

    deepspeed.comm.new_group = new_group
    try:
        yield
    finally:
        deepspeed.comm.new_group = original_new_group


def open_connections(neighbours: Any, device: torch.device, parities: int) -> None:
    """Send one byte each way over every stage boundary, one parity after the other.

    Some libraries connect two ranks at their first message, and the first rank blocks until its peer arrives. This
    function connects the ranks before the first step. The order of parities prevents a deadlock, because a stage has at
    most one boundary of each parity.
    """
    stage = neighbours.stage
    stages = neighbours.stages
    # (channel, None without a neighbour on this side; boundary; direction): first a byte to the next stage, then one
    # back. Boundary b is between stages b and b + 1. In a ring, stage 0 receives from the last stage over boundary -1.
    transfers = (
        (neighbours.senders.get(NEXT), stage, dist.send),
        (neighbours.receivers.get(PREVIOUS), stage - 1, dist.recv),
        (neighbours.receivers.get(NEXT), stage, dist.recv),
        (neighbours.senders.get(PREVIOUS), stage - 1, dist.send),
    )
    for parity in range(parities):
        for channel, boundary, transfer in transfers:
            parity_of_boundary = boundary_parity(boundary % stages, stages)  # -1 becomes the last boundary
            if channel and parity_of_boundary == parity:
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                transfer(byte, channel.link.peer, group=channel.link.group)

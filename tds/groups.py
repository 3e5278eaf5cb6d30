"""Process groups for large worlds: where NCCL splits the world's communicator, all groups of an axis are made at once.

torch's usual way is a group at a time, in whose making every rank of the world takes part: with NCCL a collective of
all ranks for each of the hundreds of groups of a grid of pipe 16 x data 8 x model 8. One `split_group` makes all groups of an
axis. Elsewhere they are made one by one, but once: the mesh and DeepSpeed's grid share them. The borders of a
pipeline have groups of their own (borders.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch.distributed as dist

from ._deepspeed import deepspeed
from ._torch import can_split

Lines = Sequence[Sequence[int]]
AXES = ("pipe", "data", "model")


class _Made:
    """What this process has made in its world."""

    world: Any = None
    groups: dict[tuple[Any, ...], Any] = {}


def splits() -> bool:
    """Whether groups come of splitting the communicator of the world, which exists from the start where a device is bound to it."""
    world: Any = dist.group.WORLD
    device = world.bound_device_id
    return device is not None and can_split(world, device)


def of_lines(lines: Lines) -> Any:
    """This rank's group of these, which have no rank in common; None if it is in none. Every rank of the world calls it."""
    if splits():
        return dist.split_group(split_ranks=[list(line) for line in lines])
    made = [dist.new_group(list(line)) for line in lines]
    return next((group for group, line in zip(made, lines, strict=True) if dist.get_rank() in line), None)


def shared(lines: Lines) -> Any:
    """The same, but made only once: who asks for the same lines again gets the same group."""
    key = tuple(sorted(tuple(sorted(line)) for line in lines))
    return _made_once(key, lambda: of_lines(key))


def of_members(ranks: Sequence[int]) -> Any:
    """The group of these ranks, made when they first ask for it; no other rank takes part."""
    return _made_once(("members", *ranks), lambda: _of_members(ranks))


def _of_members(ranks: Sequence[int]) -> Any:
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if bound is not None:  # or it would be split off the world's communicator, for which all ranks have to ask
        world.bound_device_id = None
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        if bound is not None:
            world.bound_device_id = bound


def _made_once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    if _Made.world is not dist.group.WORLD:
        _Made.world, _Made.groups = dist.group.WORLD, {}
    if key not in _Made.groups:
        _Made.groups[key] = make()
    return _Made.groups[key]


def lines_like(line: Sequence[int], topology: Any) -> list[list[int]]:
    """`line` and all that lie like it in the grid: an axis on which it has one coordinate runs over all its values.

    topology: DeepSpeed's, or one with its methods.
    """
    coords = [topology.get_coord(rank) for rank in line]
    there = [axis for axis in AXES if axis in topology.get_axis_names()]
    kept = {axis: sorted({getattr(coord, axis) for coord in coords}) for axis in there}
    fixed = [axis for axis in there if len(kept[axis]) == 1]
    found = []
    for place in product(*(range(topology.get_dim(axis)) for axis in fixed)):
        at = {**kept, **{axis: [value] for axis, value in zip(fixed, place, strict=True)}}
        found.append(sorted(topology.get_rank(**dict(zip(there, p, strict=True))) for p in product(*at.values())))
    return found


@contextmanager
def for_deepspeed(topology: Callable[[], Any]) -> Iterator[None]:
    """Around DeepSpeed's making of the groups of a grid: it asks for one line at a time, and gets what `shared` has.

    topology: gives that of the grid, which is not there yet when the first group, that of the whole world, is made.
    """
    honest = deepspeed.comm.new_group
    known: dict[tuple[int, ...], Any] = {}  # line -> the group of this rank among those that lie like it

    def new_group(ranks: Sequence[int]) -> Any:
        line = tuple(sorted(ranks))
        if line not in known:
            lines = [line] if len(line) == dist.get_world_size() else [*map(tuple, lines_like(line, topology()))]
            if line not in lines:
                return honest(ranks)  # no stretch of the grid
            known.update(dict.fromkeys(lines, shared(lines)))
        return known[line] if dist.get_rank() in line else None

    deepspeed.comm.new_group = new_group
    try:
        yield
    finally:
        deepspeed.comm.new_group = honest

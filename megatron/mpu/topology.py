"""Coordinates of each rank in the pipe x data x model grid, computed from sizes alone, without process groups."""

from dataclasses import dataclass
from typing import NamedTuple

from .process_topology import ProcessTopology

AXES = ("pipe", "data", "model")


class Coord(NamedTuple):
    """Coordinates of one rank: pipeline stage, data-parallel replica, model-parallel rank."""

    pipe: int
    data: int
    model: int


@dataclass(frozen=True)
class Topology(ProcessTopology):
    """Grid of ranks in row-major order over (pipe, data, model); the model coordinate varies fastest.

    Model-parallel neighbours communicate most (twice a layer), so they get adjacent ranks and with them the
    fastest links. Stages communicate least and are farthest apart (Narayanan et al. 2021).
    The grid also has the methods of DeepSpeed's `ProcessTopology`, so that DeepSpeed can use it.

    context: number of consecutive data-parallel ranks that hold different tokens of the same samples (context
    parallelism). Context ranks hold the same weights and sum gradients with the other data-parallel ranks, so the grid
    has no separate context axis.
    expert: number of consecutive data-parallel ranks that divide the experts of a layer (expert parallelism). All other
    weights are the same on all data-parallel ranks.
    """

    pipe: int = 1
    data: int = 1
    model: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "context", "expert"):
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(f"the {axis} axis of the grid has size {size}; it must be at least 1")
            if axis not in AXES and self.data % size:
                raise ValueError(
                    f"{self.data} ranks of the data axis cannot be divided into {axis}-parallel groups of {size}"
                )

    @property
    def replicas(self) -> int:
        """Number of replicas that read different samples: data-parallel ranks / context ranks."""
        return self.data // self.context

    def __str__(self) -> str:
        context = f"context {self.context} x " if self.context > 1 else ""
        return f"pipe {self.pipe} x data {self.replicas} x {context}model {self.model}"

    def context_lines(self) -> list[list[int]]:
        """Return the context-parallel groups, each a list of ranks."""
        return self._consecutive_groups(self.context)

    def expert_lines(self) -> list[list[int]]:
        """Return the expert-parallel groups, each a list of ranks that together hold all experts."""
        return self._consecutive_groups(self.expert)

    def _consecutive_groups(self, group_size: int) -> list[list[int]]:
        """Return the data-parallel groups, cut into blocks of `group_size` ranks."""
        groups = []
        for ranks in self.lines("data"):
            for begin in range(0, self.data, group_size):
                groups.append(ranks[begin : begin + group_size])
        return groups

    def expert_replicas(self) -> list[list[int]]:
        """Return the groups of ranks that hold the same experts."""
        groups = []
        for ranks in self.lines("data"):
            for expert_rank in range(self.expert):
                groups.append(ranks[expert_rank :: self.expert])  # every rank with this index in its expert group
        return groups

    def world_size(self) -> int:
        """Return the number of ranks in the grid."""
        return self.pipe * self.data * self.model

    def get_axis_names(self) -> list[str]:
        """Return the axis names, for DeepSpeed."""
        return list(AXES)

    def get_rank(self, *, pipe: int, data: int, model: int) -> int:
        """Return the rank at these coordinates. Raises ValueError outside the grid."""
        coord = Coord(pipe, data, model)
        for axis, index in zip(AXES, coord, strict=True):
            if not 0 <= index < getattr(self, axis):
                raise ValueError(f"{axis}={index} lies outside the grid {self}")
        return (pipe * self.data + data) * self.model + model

    def get_coord(self, rank: int) -> Coord:
        """Return the coordinates of `rank`. Raises ValueError outside the grid."""
        if not 0 <= rank < self.world_size():
            raise ValueError(f"rank {rank} lies outside the grid {self} of {self.world_size()} ranks")
        pipe_and_data, model = divmod(rank, self.model)
        pipe, data = divmod(pipe_and_data, self.data)
        return Coord(pipe, data, model)

    def lines(self, *varying: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in the `varying` axes; each group is in rank order."""
        fixed = [axis for axis in AXES if axis not in varying]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size()):
            coord = self.get_coord(rank)
            fixed_coord = tuple(getattr(coord, axis) for axis in fixed)
            groups.setdefault(fixed_coord, []).append(rank)
        return list(groups.values())

"""Coordinates of all ranks (Topology), process groups of this rank (Mesh), options of sharded layers (Options)."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from .process_topology import ProcessTopology

if TYPE_CHECKING:
    from .linear import SecondKernelUse

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

    context: number of consecutive data-parallel ranks that hold different tokens of the same samples. They hold the
    same weights and sum gradients with the other data-parallel ranks, so the grid has no separate context axis.
    expert: number of consecutive data-parallel ranks that divide the experts of a layer.
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
            if axis not in AXES and self.data % size:  # context and expert groups divide the data axis
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
        # On a grid of 2 x 1 x 2, lines("model") are [0, 1] and [2, 3], and lines("pipe") are [0, 2] and [1, 3].
        fixed = [axis for axis in AXES if axis not in varying]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size()):
            coord = self.get_coord(rank)
            fixed_coord = tuple(getattr(coord, axis) for axis in fixed)
            groups.setdefault(fixed_coord, []).append(rank)
        return list(groups.values())


@dataclass(frozen=True)
class Axis:
    """Process group of this rank along one or more axes of the grid.

    group: the process group, None for a single rank, which never communicates.
    ranks: global ranks of the group.
    rank: index of this process within the group.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def first(self) -> int:
        """Global rank of the group's first process."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """Group name that functional collectives use."""
        return self.group.group_name if self.group is not None else ""


TRIVIAL_AXIS = Axis(None, (0,), 0)


@dataclass(frozen=True)
class Options:
    """Communication and kernel options of sharded layers.

    sequence_parallel: between sharded layers, each rank holds only its shard of the sequence.
    overlap: all-reduce the gradient of a layer's input while the gradient of the layer's weight is computed.
    onednn: run fp32 matmuls on a CPU in oneDNN instead of torch's BLAS. `linear.py` explains overlap and onednn.
    second_kernel: (dtype, o, i) of a weight [o, i] -> its matmuls that run in the second kernel of `linear.matmul`,
    such as (float32, 4096, 1024) -> (True, False, False). (dtype, 0, 0) is for other weights. Where both are missing,
    `onednn` decides.
    wgrad_in_graph: in compiled code, too, call the weight's `ParamSpec.accumulate_wgrad` instead of giving the weight's
    gradient to autograd.
    fp8: run the matmuls of outputs and of input gradients in fp8; see `fp8.py`.
    """

    sequence_parallel: bool = False
    overlap: bool = True
    onednn: bool = False
    wgrad_in_graph: bool = False
    fp8: bool = False
    second_kernel: "dict[tuple[torch.dtype, int, int], SecondKernelUse]" = field(default_factory=dict, compare=False)

    def sequence_axis(self, axis: Axis) -> Axis:
        """Return the ranks that shard a sequence between layers: `axis` with sequence parallelism, else this rank."""
        return axis if self.sequence_parallel else TRIVIAL_AXIS


class Share(NamedTuple):
    """Part of an iteration's samples that a rank reads: `rank` is its index, `size` the number of equal parts."""

    rank: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """All process groups of this rank.

    pipe, data, model: this rank's group along each of the three axes.
    replica: the ranks that together hold one copy of the model (pipe x model).
    context: consecutive ranks of the data axis that hold different tokens of the same samples.
    expert: consecutive ranks of the data axis that hold different experts. expert_replicas: the ranks of the data axis
    that hold the same experts as this rank. With expert parallelism, their group exists even for one rank.
    """

    topology: Topology = Topology()
    pipe: Axis = TRIVIAL_AXIS
    data: Axis = TRIVIAL_AXIS
    model: Axis = TRIVIAL_AXIS
    replica: Axis = TRIVIAL_AXIS
    context: Axis = TRIVIAL_AXIS
    expert: Axis = TRIVIAL_AXIS
    expert_replicas: Axis = TRIVIAL_AXIS

    @property
    def share(self) -> Share:
        """This rank's share of the samples; all ranks of a context-parallel group have the same share."""
        # Of 8 data-parallel ranks in context-parallel groups of 2, ranks 6 and 7 have share 3 of 4.
        return Share(self.data.rank // self.context.size, self.data.size // self.context.size)

    @classmethod
    def build(cls, topology: Topology) -> "Mesh":
        """Create the process groups; every rank of the world must call this with the same arguments."""
        world_size = dist.get_world_size()
        if world_size != topology.world_size():
            raise ValueError(f"{world_size} ranks are running, but the grid {topology} needs {topology.world_size()}")
        # Layers wait for the model axis, so its group is urgent. It comes first, as other axes of equal ranks reuse it.
        model = axis_of(topology.lines("model"), urgent=True)
        pipe = axis_of(topology.lines("pipe"))
        data = axis_of(topology.lines("data"))
        replica = axis_of(topology.lines("pipe", "model"))
        from .subgroups import with_subgroups  # adds context and expert groups; imports this file

        return with_subgroups(cls(topology, pipe, data, model, replica))


def axis_of(groups: list[list[int]], urgent: bool = False) -> Axis:
    """Return this rank's axis among `groups`, lists of ranks. urgent: its messages go before those of other groups."""
    from tds.groups import shared_groups  # imports DeepSpeed, which a single process does not need

    rank = dist.get_rank()
    ranks = next(members for members in groups if rank in members)  # each rank is in one of the groups
    group = shared_groups(groups, urgent) if len(ranks) > 1 else None  # a single rank never communicates
    return Axis(group, tuple(ranks), ranks.index(rank))


def group_of_members(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of `ranks`; only these ranks need to call this function."""
    from tds.groups import member_group

    return member_group(ranks)  # type: ignore[no-any-return]

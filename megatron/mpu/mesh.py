"""Process groups of this rank (Mesh) and options of sharded layers (Options)."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from .topology import Topology

if TYPE_CHECKING:
    from .linear import Products


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


def neighbours(axis: Axis, count: int) -> Axis:
    """Return the block of `count` consecutive ranks of `axis` that contains this rank.

    All ranks of the block must call this function together. count must divide the size of the axis.
    """
    if count == axis.size:
        return axis
    block_begin = axis.rank - axis.rank % count
    ranks = axis.ranks[block_begin : block_begin + count]
    group = group_of_members(ranks) if count > 1 else None
    return Axis(group, ranks, axis.rank - block_begin)


@dataclass(frozen=True)
class Options:
    """Communication and kernel options of sharded layers.

    sequence_parallel: between sharded layers, each rank holds only its shard of the sequence
    (Korthikanti et al. 2022).
    overlap: all-reduce the gradient of a layer's input while the gradient of the layer's weight is computed.
    onednn: run fp32 matmuls on a CPU in oneDNN instead of torch's BLAS. `linear.py` explains overlap and onednn.
    products: (dtype, o, i) of a weight [o, i] -> its products that run in the second kernel of `linear.matmul`.
    (dtype, 0, 0) is for other weights. Where both are missing, `onednn` decides.
    wgrad_in_graph: in compiled code, too, call the weight's `ParamSpec.accumulate_wgrad` instead of giving the weight's
    gradient to autograd.
    fp8: run the matmuls of outputs and of input gradients in fp8; see `fp8.py`.
    """

    sequence_parallel: bool = False
    overlap: bool = True
    onednn: bool = False
    wgrad_in_graph: bool = False
    fp8: bool = False
    products: "dict[tuple[torch.dtype, int, int], Products]" = field(default_factory=dict, compare=False)

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
    replica: the ranks that together hold one copy of the model (pipe x model), over which norms of all
    parameters are summed.
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
        return Share(self.data.rank // self.context.size, self.data.size // self.context.size)

    @classmethod
    def build(cls, topology: Topology) -> "Mesh":
        """Create the process groups; every rank of the world must call this with the same arguments."""
        if dist.get_world_size() != topology.world_size():
            raise ValueError(
                f"{dist.get_world_size()} ranks are running, but the grid {topology} needs {topology.world_size()}"
            )
        # Every layer waits for the all-reduces of the model axis. It comes first, as axes of equal ranks share a group.
        model = cls._axis_of(topology.lines("model"), urgent=True)
        pipe = cls._axis_of(topology.lines("pipe"))
        data = cls._axis_of(topology.lines("data"))
        replica = cls._axis_of(topology.lines("pipe", "model"))
        context = cls._axis_of(topology.context_lines())
        mesh = cls(topology, pipe, data, model, replica, context)
        if topology.expert == 1:
            return mesh
        expert = cls._axis_of(topology.expert_lines())
        same_experts = cls._axis_of(topology.expert_replicas())
        # ZeRO and the reduction of experts need a group even for a single rank.
        same_experts = replace(same_experts, group=same_experts.group or group_of_members(same_experts.ranks))
        return replace(mesh, expert=expert, expert_replicas=same_experts)

    @staticmethod
    def _axis_of(groups: list[list[int]], urgent: bool = False) -> Axis:
        from tds.groups import shared_groups  # imports DeepSpeed, which a single process does not need

        rank = dist.get_rank()
        ranks = next(members for members in groups if rank in members)
        group = shared_groups(groups, urgent) if len(ranks) > 1 else None
        return Axis(group, tuple(ranks), ranks.index(rank))


def group_of_members(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of `ranks`; only these ranks need to call this function."""
    from tds.groups import member_group

    return member_group(ranks)  # type: ignore[no-any-return]

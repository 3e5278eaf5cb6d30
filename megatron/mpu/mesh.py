"""The process groups of this run; the one Mesh of a process is the only global in mpu."""

from dataclasses import dataclass, field, replace

import torch.distributed as dist

from .random import RngStreams
from .topology import Topology


@dataclass(frozen=True)
class Axis:
    """This rank's line of neighbours along some axes of the grid.

    group: the process group, None when this rank is alone (nothing to say to anybody);
    ranks: global ranks of the line; rank: this process's place in it. sequence_parallel: between
    the layers that are split, each rank has its own stretch of the sequence alone. overlap: talk about a layer's
    input while its weight is worked on.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    sequence_parallel: bool = False
    overlap: bool = True

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def first(self) -> int:
        """Global rank of the first process of the line."""
        return self.ranks[0]


ALONE = Axis(None, (0,), 0)


@dataclass(frozen=True)
class Mesh:
    """All lines through this rank.

    pipe, data, model: along one axis; replica: the ranks that hold one copy of the model
    together (pipe x model), over which a norm of all parameters is summed. onednn: let linear layers
    built from now on multiply fp32 matrices on a CPU by oneDNN instead of torch's BLAS.
    """

    topology: Topology = Topology()
    pipe: Axis = ALONE
    data: Axis = ALONE
    model: Axis = ALONE
    replica: Axis = ALONE
    rng: RngStreams = field(default_factory=RngStreams)
    onednn: bool = False

    @classmethod
    def build(
        cls,
        topology: Topology,
        seed: int = 1234,
        sequence_parallel: bool = False,
        onednn: bool = False,
        overlap: bool = True,
    ) -> "Mesh":
        """Make the groups; every rank of the world must call this with the same arguments."""
        if dist.get_world_size() != topology.world_size():
            raise ValueError(
                f"{dist.get_world_size()} ranks are running, but the grid pipe {topology.pipe} x data "
                f"{topology.data} x model {topology.model} has {topology.world_size()} places"
            )
        lines = {name: cls._line(topology, name) for name in ("pipe", "data", "model")}
        replica = cls._line(topology, "pipe", "model")
        if topology.model > 1:
            lines["model"] = replace(lines["model"], sequence_parallel=sequence_parallel, overlap=overlap)
        rng = RngStreams(seed, lines["data"].rank, lines["model"].rank, lines["pipe"].rank)
        return cls(topology, **lines, replica=replica, rng=rng, onednn=onednn)

    @staticmethod
    def _line(topology: Topology, *varying: str) -> Axis:
        mine = None
        for ranks in topology.lines(*varying):
            # Every rank must make every group, in the same order, or the next collective hangs.
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                mine = Axis(group, tuple(ranks), ranks.index(dist.get_rank()))
        assert mine is not None
        return mine


class _Current:
    mesh: Mesh | None = None


def enter(mesh: Mesh | None) -> None:
    """Make `mesh` the one that layers built from now on take their axes from."""
    _Current.mesh = mesh


def is_initialized() -> bool:
    return _Current.mesh is not None


def current() -> Mesh:
    """The mesh of this run; a single process needs none and stands alone on every axis."""
    if _Current.mesh is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("no mesh yet: call mpu.initialize_model_parallel() before building layers")
        _Current.mesh = Mesh()
    return _Current.mesh


def sequence_axis(axis: Axis | None = None) -> Axis:
    """The ranks that share a sequence out: those of `axis` (the model-parallel ones), or without sequence parallelism nobody else."""
    axis = axis or current().model
    return axis if axis.sequence_parallel else ALONE

"""Where this process stands (Mesh) and how layers use it (Options); what new layers are built with is the only global in mpu."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from .random import RngStreams
from .topology import Topology


@dataclass(frozen=True)
class Axis:
    """This rank's line of neighbours along some axes of the grid.

    group: the process group, None when this rank is alone (nothing to say to anybody);
    ranks: global ranks of the line; rank: this process's place in it.
    """

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @property
    def first(self) -> int:
        """Global rank of the first process of the line."""
        return self.ranks[0]

    @property
    def name(self) -> str:
        """By which functional collectives know its group."""
        return self.group.group_name if self.group is not None else ""


ALONE = Axis(None, (0,), 0)


def neighbours(axis: Axis, count: int) -> Axis:
    """Those `count` ranks of `axis`, counted off from its first, of which this is one; all of them must call it. count divides the axis."""
    if count == axis.size:
        return axis
    first = axis.rank - axis.rank % count
    ranks = axis.ranks[first : first + count]
    return Axis(group_of_members(ranks) if count > 1 else None, ranks, axis.rank - first)


@dataclass(frozen=True)
class Options:
    """How layers work on the ranks that they are split over.

    sequence_parallel: between layers that are split, each rank has its own stretch of the sequence only (Korthikanti
    et al. 2022). overlap: sum the gradients of a layer's input over the ranks while those of its weight are computed.
    onednn: multiply fp32 matrices on a CPU by oneDNN instead of torch's BLAS; for the last two see `linear.py`.
    """

    sequence_parallel: bool = False
    overlap: bool = True
    onednn: bool = False

    def sequence_axis(self, axis: Axis) -> Axis:
        """The ranks that share a sequence out between layers that are split over `axis`: all of these, or nobody else."""
        return axis if self.sequence_parallel else ALONE


class Share(NamedTuple):
    """Which of the equal shares of the samples of an iteration a rank reads: `number`, from 0, of `of`."""

    number: int
    of: int


@dataclass(frozen=True)
class Mesh:
    """All lines through this rank.

    pipe, data, model: along one axis; replica: the ranks that hold one copy of the model
    together (pipe x model), over which a norm of all parameters is summed. context: those neighbours of the data axis that share
    out the tokens of the same samples.
    """

    topology: Topology = Topology()
    pipe: Axis = ALONE
    data: Axis = ALONE
    model: Axis = ALONE
    replica: Axis = ALONE
    context: Axis = ALONE

    @property
    def share(self) -> Share:
        """Of the samples; the ranks of `context` have the same."""
        return Share(self.data.rank // self.context.size, self.data.size // self.context.size)

    @classmethod
    def build(cls, topology: Topology) -> "Mesh":
        """Make the groups; every rank of the world must call this with the same arguments."""
        if dist.get_world_size() != topology.world_size():
            raise ValueError(
                f"{dist.get_world_size()} ranks are running, but the grid {topology} has {topology.world_size()} places"
            )
        lines = {name: cls._line(topology.lines(name)) for name in ("pipe", "data", "model")}
        replica = cls._line(topology.lines("pipe", "model"))
        return cls(topology, **lines, replica=replica, context=cls._line(topology.context_lines()))

    def streams(self, seed: int) -> RngStreams:
        """The dropout streams of this rank."""
        return RngStreams(seed, self.data.rank, self.model.rank, self.pipe.rank)

    @staticmethod
    def _line(lines: list[list[int]]) -> Axis:
        from tds.groups import shared  # DeepSpeed, which one process without ranks is spared

        ranks = next(line for line in lines if dist.get_rank() in line)
        return Axis(shared(lines) if len(ranks) > 1 else None, tuple(ranks), ranks.index(dist.get_rank()))


@dataclass(frozen=True)
class Surroundings:
    """What layers are built with: where the ranks are, how to work on them, and what dropout draws from."""

    mesh: Mesh = field(default_factory=Mesh)
    options: Options = Options()
    rng: RngStreams = field(default_factory=RngStreams)

    @property
    def sequence(self) -> Axis:
        """The ranks that share a sequence out; see `Options.sequence_axis`."""
        return self.options.sequence_axis(self.mesh.model)


def group_of_members(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of these ranks, in whose making no other takes part."""
    from tds.groups import of_members

    return of_members(ranks)  # type: ignore[no-any-return]


class _Current:
    here: Surroundings | None = None


def enter(here: Surroundings | None) -> None:
    """Let layers built from now on take what they need from `here`."""
    _Current.here = here


@contextmanager
def built_with(mesh: Mesh, options: Options | None = None, seed: int = 1234) -> Iterator[Surroundings]:
    """Layers built inside stand on `mesh` for good and work as `options` say; afterwards all is as it was.

    So models on several meshes live in one process. seed: of the dropout streams of what is built inside.
    """
    before = _Current.here
    here = Surroundings(mesh, options or Options(), mesh.streams(seed))
    enter(here)
    try:
        yield here
    finally:
        enter(before)


def is_initialized() -> bool:
    """Whether this process stands in a mesh."""
    return _Current.here is not None


def surroundings() -> Surroundings:
    """What layers built now take; a single process needs to say nothing, and stands alone on every axis."""
    if _Current.here is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("no mesh yet: call mpu.initialize_model_parallel() before building layers")
        _Current.here = Surroundings()
    return _Current.here


def current() -> Mesh:
    """The mesh of `surroundings()`."""
    return surroundings().mesh

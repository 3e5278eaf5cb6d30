"""Process groups of this rank (Mesh), options of sharded layers (Options), and both together (ParallelContext).

The current `ParallelContext` is the only global state of mpu.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from .random import RngStreams
from .topology import Topology


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
    first = axis.rank - axis.rank % count
    ranks = axis.ranks[first : first + count]
    return Axis(group_of_members(ranks) if count > 1 else None, ranks, axis.rank - first)


@dataclass(frozen=True)
class Options:
    """Communication and kernel options of sharded layers.

    sequence_parallel: between sharded layers, each rank holds only its shard of the sequence
    (Korthikanti et al. 2022).
    overlap: all-reduce the gradient of a layer's input while the gradient of the layer's weight is computed.
    onednn: run fp32 matmuls on a CPU in oneDNN instead of torch's BLAS. `linear.py` explains overlap and onednn.
    wgrad_in_graph: in compiled code, too, call the weight's `ParamSpec.accumulate_wgrad` instead of giving the weight's
    gradient to autograd.
    fp8: run the matmuls of outputs and of input gradients in fp8; see `fp8.py`.
    """

    sequence_parallel: bool = False
    overlap: bool = True
    onednn: bool = False
    wgrad_in_graph: bool = False
    fp8: bool = False

    def sequence_axis(self, axis: Axis) -> Axis:
        """Return the ranks that shard a sequence between layers: `axis` with sequence parallelism, else this rank."""
        return axis if self.sequence_parallel else TRIVIAL_AXIS


class Share(NamedTuple):
    """Part of an iteration's samples that a rank reads: `number` is its index, `of` the number of equal parts."""

    number: int
    of: int


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
        model = cls._line(topology.lines("model"), urgent=True)
        lines = {name: cls._line(topology.lines(name)) for name in ("pipe", "data")}
        replica = cls._line(topology.lines("pipe", "model"))
        lines["context"] = cls._line(topology.context_lines())
        if topology.expert > 1:
            lines["expert"] = cls._line(topology.expert_lines())
            same = cls._line(topology.expert_replicas())
            lines["expert_replicas"] = replace(same, group=same.group or group_of_members(same.ranks))
        return cls(topology, **lines, model=model, replica=replica)

    def streams(self, seed: int) -> RngStreams:
        """Return the dropout streams of this rank."""
        return RngStreams(seed, self.data.rank, self.model.rank, self.pipe.rank)

    @staticmethod
    def _line(lines: list[list[int]], urgent: bool = False) -> Axis:
        from tds.groups import shared  # imports DeepSpeed, which a single process does not need

        ranks = next(line for line in lines if dist.get_rank() in line)
        return Axis(shared(lines, urgent) if len(ranks) > 1 else None, tuple(ranks), ranks.index(dist.get_rank()))


@dataclass(frozen=True)
class ParallelContext:
    """Context that layers copy when they are built: their ranks, options, dropout streams and initialisation.

    defer_init: declared parameters stay uninitialised; the caller fills them later by global name.
    skip_init: seeded initialisation is skipped, for a model whose weights are all loaded from a file afterwards.
    Initialisation from torch's generator still happens, so that layers built afterwards draw the same values as
    without skip_init.
    after_layer: called with each layer of a model after its initialisation, before the next layer is built.
    """

    mesh: Mesh = field(default_factory=Mesh)
    options: Options = Options()
    rng: RngStreams = field(default_factory=RngStreams)
    defer_init: bool = False
    skip_init: bool = False
    after_layer: Callable[[nn.Module], None] | None = None

    @property
    def sequence(self) -> Axis:
        """Sequence-parallel axis; see `Options.sequence_axis`."""
        return self.options.sequence_axis(self.mesh.model)


def group_of_members(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of `ranks`; only these ranks need to call this function."""
    from tds.groups import of_members

    return of_members(ranks)  # type: ignore[no-any-return]


class _Current:
    context: ParallelContext | None = None


def enter(context: ParallelContext | None) -> None:
    """Make `context` the current context, which each layer copies when it is built; None removes the current one."""
    _Current.context = context


def is_initialized() -> bool:
    """Return whether this process has a current mesh."""
    return _Current.context is not None


def parallel_context() -> ParallelContext:
    """Return the current context, or in a single process a default one with one rank on every axis.

    Raises RuntimeError if several ranks run and there is no current context.
    """
    if _Current.context is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError("model parallelism is not initialized: call mpu.initialize_model_parallel() first")
        _Current.context = ParallelContext()
    return _Current.context


def current() -> Mesh:
    """Return the mesh of `parallel_context()`."""
    return parallel_context().mesh


def context_on(mesh: Mesh, options: Options | None, seed: int) -> ParallelContext:
    """Return a copy of the current context with `mesh`, `options` and dropout streams seeded by `seed`."""
    before = _Current.context or ParallelContext()
    return replace(before, mesh=mesh, options=options or Options(), rng=mesh.streams(seed))


@contextmanager
def built_with(mesh: Mesh, options: Options | None = None, seed: int = 1234) -> Iterator[ParallelContext]:
    """Build layers inside the block on `mesh` with `options`; restore the previous context afterwards.

    The layers keep their mesh and options, so models on several meshes can coexist in one process. seed: seed of
    the layers' dropout streams.
    """
    before = _Current.context
    context = context_on(mesh, options, seed)
    enter(context)
    try:
        yield context
    finally:
        enter(before)


@contextmanager
def _changed(name: str, value: Any) -> Iterator[None]:
    """Set one field of the current context inside the block; afterwards restore this field and no other."""
    before = getattr(parallel_context(), name)
    enter(replace(parallel_context(), **{name: value}))
    try:
        yield
    finally:
        enter(replace(parallel_context(), **{name: before}))


def defer_init() -> AbstractContextManager[None]:
    """Leave parameters declared inside the block uninitialised; see `ParallelContext.defer_init`."""
    return _changed("defer_init", True)


def skip_init() -> AbstractContextManager[None]:
    """Skip seeded initialisation inside the block; see `ParallelContext.skip_init`."""
    return _changed("skip_init", True)


def after_each_layer(then: Callable[[nn.Module], None] | None) -> AbstractContextManager[None]:
    """Make each LayerStack built inside the block call `then(layer)` for each of its layers.

    See `ParallelContext.after_layer`.
    """
    return _changed("after_layer", then)

"""The current `ParallelContext`, which layers copy when they are built."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from .mesh import Axis, Mesh, Options
from .random import RngStreams


@dataclass(frozen=True)
class ParallelContext:
    """Context that layers copy when they are built: their ranks, options, dropout streams and initialisation.

    defer_init: declared parameters stay uninitialised; the caller fills them later by global name.
    skip_init: seeded initialisation is skipped, for a model whose weights are all loaded from a file afterwards.
    Initialisation from torch's generator still happens, so that later layers draw the same values as without it.
    after_layer: called with each layer of a model after its initialisation, before the next layer is built.
    """

    mesh: Mesh = field(default_factory=Mesh)
    options: Options = field(default_factory=Options)
    rng: RngStreams = field(default_factory=RngStreams)
    defer_init: bool = False
    skip_init: bool = False
    after_layer: Callable[[nn.Module], None] | None = None

    @property
    def sequence(self) -> Axis:
        """Sequence-parallel axis; see `Options.sequence_axis`."""
        return self.options.sequence_axis(self.mesh.model)


class _Current:
    context: ParallelContext | None = None


def set_context(context: ParallelContext | None) -> None:
    """Make `context` the current context, which each layer copies when it is built; None removes the current one."""
    _Current.context = context


def model_parallel_is_initialized() -> bool:
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


def current_mesh() -> Mesh:
    """Return this rank's mesh. Raises RuntimeError if several ranks run before `initialize_model_parallel`."""
    return parallel_context().mesh


def make_context(mesh: Mesh, options: Options | None, seed: int) -> ParallelContext:
    """Return a copy of the current context with `mesh`, `options` and dropout streams seeded by `seed`."""
    previous = _Current.context or ParallelContext()
    rng = RngStreams(seed, mesh.data.rank, mesh.model.rank, mesh.pipe.rank)
    return replace(previous, mesh=mesh, options=options or Options(), rng=rng)


@contextmanager
def replaced_field(name: str, value: Any) -> Iterator[None]:
    """Set one field of the current context inside the block; then restore it alone, as others may have changed."""
    previous = getattr(parallel_context(), name)
    set_context(replace(parallel_context(), **{name: value}))
    try:
        yield
    finally:
        set_context(replace(parallel_context(), **{name: previous}))


def defer_init() -> AbstractContextManager[None]:
    """Leave parameters declared inside the block uninitialised; see `ParallelContext.defer_init`."""
    return replaced_field("defer_init", True)


def skip_init() -> AbstractContextManager[None]:
    """Skip seeded initialisation inside the block; see `ParallelContext.skip_init`."""
    return replaced_field("skip_init", True)

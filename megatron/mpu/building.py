"""Building of layers on a mesh of their own, or with a call after each layer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from .current import ParallelContext, _Current, make_context, replaced_field, set_context
from .mesh import Mesh, Options


@contextmanager
def built_with(mesh: Mesh, options: Options | None = None, seed: int = 1234) -> Iterator[ParallelContext]:
    """Build layers inside the block on `mesh` with `options`; restore the previous context afterwards.

    The layers keep their mesh and options, so models on several meshes can coexist in one process. seed: seed of
    the layers' dropout streams.
    """
    previous = _Current.context
    context = make_context(mesh, options, seed)
    set_context(context)
    try:
        yield context
    finally:
        set_context(previous)


def after_each_layer(then: Callable[[nn.Module], None] | None) -> AbstractContextManager[None]:
    """Make each LayerStack built inside the block call `then(layer)` for each of its layers.

    See `ParallelContext.after_layer`.
    """
    return replaced_field("after_layer", then)

"""Waiting for all-gathered weights in the next forward pass, layer by layer, instead of at the end of a step."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from ._torch import exclude_from_compile
from .buckets import Bucket


def layers_that_wait(model: Any) -> list[nn.Module]:
    """Return the layers that `model` calls as modules, in the order of its forward pass.

    model: a PipelineModule, a SequentialModule, or another module with `layer_functions`, a list of callables. A layer
    that a function calls, such as a tied layer with a `forward_fn`, is left out.
    Raises ValueError if there are no such layers, because no layer would then wait for its gathered weights.
    """
    # A PipelineModule has `forward_funcs` instead of `layer_functions`; an unsuitable module has neither.
    functions: Any = getattr(model, "layer_functions", None) or getattr(model, "forward_funcs", ())
    layers = [each for each in functions if isinstance(each, nn.Module)]
    if not layers:
        raise ValueError(
            f"tds.DistributedOptimizer(overlap_gather=True) needs a PipelineModule or a SequentialModule, not "
            f"{type(model).__name__}: leave overlap_gather out"
        )
    return layers


class DeferredGathers:
    """Hooks on a model's layers that wait for the weights of a layer just before the layer runs.

    Before a layer runs, its own weights and those of all earlier layers are complete, because a layer may read weights
    of an earlier one. A bucket with other weights, such as tied ones, is not deferred.
    """

    def __init__(self, buckets: Sequence[Bucket], layers: Sequence[nn.Module]) -> None:
        first_user: dict[nn.Parameter, int] = {}  # weight -> index of the first layer that has it
        for index, layer in enumerate(layers):
            for p in layer.parameters():
                first_user.setdefault(p, index)
        # Bucket -> index of the first layer that uses it; -1 if it has weights that no layer in `layers` has.
        self._first_layer = {}
        for bucket in buckets:
            self._first_layer[bucket] = min(first_user.get(p, -1) for p in bucket.parameters)
        self._pending: deque[Bucket] = deque()  # filled by `defer` in each step
        for index, layer in enumerate(layers):
            # torch passes (module, inputs), which the hook ignores. The default keeps the index of this layer.
            hook = exclude_from_compile(lambda *_, index=index: self.wait(index), layer)
            layer.register_forward_pre_hook(hook, prepend=True)

    def defer(self) -> None:
        """Wait only for the buckets that no layer's hook waits for. Call this when all all-gathers have started."""
        self._pending = deque(sorted(self._first_layer, key=self._first_layer.__getitem__))  # in the order of use
        self.wait(-1)  # buckets without a first layer

    def wait(self, last: int | None = None) -> None:
        """Wait for the weights of the layers up to index `last`, by default of all layers."""
        while self._pending and (last is None or self._first_layer[self._pending[0]] <= last):
            self._pending.popleft().wait()

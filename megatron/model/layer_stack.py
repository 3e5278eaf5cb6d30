"""All layers of a model in one process."""

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron import mpu

from .block import TransformerLayer
from .layers import Layer, LayerRunner, attach, fill_parameters, global_names


def _raise_not_built(inputs: Any, *more: Any) -> Any:
    raise RuntimeError("this layer was not built in this process, because it is on another pipeline stage")


def transformer_layers(model: nn.Module) -> list[TransformerLayer]:
    """Return the transformer layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


class LayerStack(LayerRunner, nn.Module):
    """All layers of a model in one process, or only the layers whose indices are in `own`.

    seed: seed of the initial weights.
    own: indices of the layers to build, for generation over pipeline stages; calling any other layer raises
    RuntimeError.
    layer_names: global names of all layers in order.
    """

    def __init__(
        self, layers: Sequence[Layer], seed: int, checkpoint_num_layers: int = 0, own: Container[int] | None = None
    ) -> None:
        super().__init__()
        self._recompute_group_size = checkpoint_num_layers
        self._rng = mpu.get_rng()
        self.steps: list[tuple[Layer, Callable[..., Any]]] = []
        self._built_layers: dict[str, nn.Module] = {}
        self.layer_names = global_names(layers)
        for i, (layer, name) in enumerate(zip(layers, self.layer_names, strict=True)):
            call: Callable[..., Any] = _raise_not_built
            if own is None or i in own:
                # Tied layers have the same name and share one module.
                module = self._built_layers.get(name)
                if module is None:
                    module = self._build(layer, name, seed)
                call = partial(layer.call, module) if layer.call else module
            self.steps.append((layer, call))

    def _build(self, layer: Layer, name: str, seed: int) -> nn.Module:
        """Build a layer, register it under `name`, and initialise its parameters."""
        module = layer.build(seed)
        attach(self, name, module)
        self._built_layers[name] = module
        named_parameters = [(f"{name}.{path}", p) for path, p in module.named_parameters()]
        fill_parameters(named_parameters, seed)
        after_layer = mpu.parallel_context().after_layer
        if after_layer is not None:  # a hook that works on each layer before the next one is built
            after_layer(module)
        return module

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (global name, module) of every layer built in this process, tied layers once."""
        yield from self._built_layers.items()

    @property
    def layer_functions(self) -> list[Callable[..., Any]]:
        """The layers and functions that `run` calls, in this order; see `tds.DistributedOptimizer`."""
        return [call for _, call in self.steps]

    def run(self, inputs: Any) -> Any:
        """Run all layers in order."""
        return self.run_steps(self.steps, inputs)

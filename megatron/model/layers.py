"""Model as a list of layers, from which each process builds all or those of its pipeline stage.

Names are global: `layers.3.attention.dense.weight` is the same parameter in every layout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron import mpu
from megatron._torch import persistent_buffers

PLACEHOLDER = "placeholder_of_group_"  # begin of the names of weights that only fill an optimizer's empty groups


@dataclass(frozen=True)
class Layer:
    """Layer that is not built yet.

    name: global name of the layer, a dotted path. `cls(*args)` builds it.
    tied: key of tied layers, or None. Layers with the same key share one module, which has the first layer's name.
    call: function that runs the layer as `call(module, inputs)`; None calls the module itself.
    outputs: names of the tensors that the layer returns. A stage boundary after the layer needs them.
    repeated: True for transformer layers, of which a stack has many; their activations may be recomputed.
    prelude: True for a layer that is recomputed with the layer after it, but not counted in `checkpoint_num_layers`.
    work: number of multiply-adds in the layer's forward pass over one sample, see work.py.
    routes: whether the layer has a mixture of experts, see routing.py.
    """

    name: str
    cls: type[nn.Module]
    args: tuple[Any, ...] = ()
    tied: str | None = None
    call: Callable[[Any, Any], Any] | None = None
    outputs: tuple[str, ...] = ("hidden", "document_ids")
    repeated: bool = False
    prelude: bool = False
    work: int = 0
    routes: bool = False

    def build(self, seed: int) -> nn.Module:
        """Build the module; its constructor draws random numbers from a generator seeded by (seed, layer name).

        Parameters passed to `mpu.declare` stay uninitialised; `init_weights` fills them afterwards.
        """
        with mpu.defer_init(), mpu.seeded(mpu.derive_seed(seed, "layer", self.name)):
            return self.cls(*self.args)


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` under a dotted path, creating its parents, so that `root.state_dict()` has the global names."""
    *parents, leaf = path.split(".")  # of "layers.3", the parent "layers" and the leaf "3"
    for name in parents:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)


# Function that runs a layer as observe(layer, call, inputs) and returns what call(inputs) returns.
Observer = Callable[[Layer, Callable[[Any], Any], Any], Any]
Steps = Sequence[tuple[Layer, Callable[[Any], Any]]]  # (layer, function that calls its module)
NamedTensors = Callable[[nn.Module], Iterable[tuple[str, Any]]]  # such as nn.Module.named_parameters


def global_names(layers: Sequence[Layer]) -> list[str]:
    """Return the global name of each layer's module; layers that share a module have the name of the first of them.

    Raises ValueError if two modules have the same name.
    """
    names: list[str] = []
    name_of_key: dict[str, str] = {}  # key of tied layers -> name of the first of them
    for layer in layers:
        if layer.tied in name_of_key:  # not the first layer with this key
            names.append(name_of_key[layer.tied])
            continue
        if layer.name in names:
            raise ValueError(
                f"two layers have the name {layer.name!r}: rename one, or give both the same key tied= to share a "
                "module"
            )
        names.append(layer.name)
        if layer.tied:  # the first layer with this key
            name_of_key[layer.tied] = layer.name
    return names


class LayerRunner:
    """Mixin for models that are lists of layers, and whose loss function may report values besides the loss.

    observe: runs each layer, or None.
    """

    loss_fn: Any = None
    observe: Observer | None = None
    _recompute_group_size = 0  # number of layers in a recomputed group, 0 without recomputation
    _rng: mpu.RngStreams  # dropout streams from which the layers draw
    training: bool

    def run_steps(self, steps: Steps, inputs: Any) -> Any:
        """Pass `inputs` through all steps in order."""
        if self.training and self._recompute_group_size:
            from .recomputed_groups import run_in_groups

            return run_in_groups(self._run_each, steps, inputs, self._recompute_group_size, self._rng)
        return self._run_each(steps, inputs)

    def _run_each(self, steps: Steps, inputs: Any) -> Any:
        for layer, call in steps:
            if self.observe is None:
                inputs = call(inputs)
            else:
                inputs = self.observe(layer, call, inputs)
        return inputs

    def get_additional_losses(self) -> dict[str, Tensor]:
        """Return the values that the loss function reported for the last micro-batch besides the loss: name -> scalar.

        DeepSpeed calls this method on pipeline modules.
        """
        return getattr(self.loss_fn, "aux", {})


def global_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (global name, parameter) of every parameter that this process holds.

    Parameters of a model without `named_layers` have the names of `named_parameters()`. In a DeepSpeed
    PipelineModule these names contain each layer's index in the whole list, or the key of a tied layer.
    """
    yield from _add_global_names(model, lambda module: module.named_parameters())


def global_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (global name, buffer [...]) of every buffer that the model's state_dict contains."""
    yield from _add_global_names(model, _named_persistent_buffers)


def _named_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what `module.named_buffers()` yields, without the buffers that its state_dict leaves out."""
    for path, inner in module.named_modules():
        for name, buffer in persistent_buffers(inner):
            yield f"{path}.{name}" if path else name, buffer


def _add_global_names(model: Any, named_tensors: NamedTensors) -> Iterator[tuple[str, Any]]:
    """Yield (global name, tensor) of all tensors in layers, then of those outside of layers, e.g. in the loss."""
    layers = model.named_layers() if hasattr(model, "named_layers") else ()
    ids_in_layers: set[int] = set()
    for layer_name, layer in layers:
        for name, tensor in named_tensors(layer):
            ids_in_layers.add(id(tensor))
            yield f"{layer_name}.{name}", tensor
    for name, tensor in named_tensors(model):  # also those in layers, under the names of the modules
        is_outside = id(tensor) not in ids_in_layers
        if is_outside and not name.startswith(PLACEHOLDER):  # weights of empty optimizer groups are not the model's
            yield name, tensor


def fill_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int) -> None:
    """Draw the initial values of declared parameters from (seed, name)."""
    for name, parameter in named_parameters:
        mpu.spec_of(parameter).fill(parameter, mpu.derive_seed(seed, "weights", name))


def init_weights(model: Any, seed: int) -> None:
    """Draw the initial values of every declared parameter of `model` from (seed, its global name).

    The values thus depend neither on the layout nor on the order in which layers are built. Undeclared parameters
    keep the values that their module gave them.
    """
    fill_parameters(global_parameters(model), seed)

"""Weights and layers that a user replaced after the engine was made: tds uses the new ones or raises an error."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ._deepspeed import flat_groups
from .clip import weights_of
from .memory import same_storage

ADVICE = (
    "copy into the weight instead (p.data.copy_(new), load_state_dict without assign), or call tds.initialize() again"
)


class ReplacedWeightError(ValueError):
    """A replaced weight that the optimizer would never step; the message names it."""


class KnownModel:
    """The weights and layers of `module` as they were when its engine was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = set(module.parameters())
        self._frozen = {p for p in self._weights if not p.requires_grad}
        self._layers = _named_layers(module)
        self._has_replaced_layers = False

    def adopt_new_layers(self) -> bool:
        """Make a PipelineModule run the layers that are registered in it now; return whether any was ever replaced.

        The module runs a list of functions that was made when it was built. Raises ReplacedWeightError if that list
        does not contain the replaced layer itself, but e.g. a function compiled from it.
        """
        for name, layer in _named_layers(self._module).items():
            old_layer = self._layers.get(name)
            if old_layer is None or old_layer is layer:
                continue
            functions: list[Any] = self._module.forward_funcs  # type: ignore[assignment]
            positions = [index for index, function in enumerate(functions) if _layer_in(function) is old_layer]
            if not positions:
                raise ReplacedWeightError(
                    f"the layer {name} was replaced, but the pipeline runs a function made from the old "
                    f"layer: replace layers before tds.initialize()"
                )
            self._layers[name] = layer
            self._has_replaced_layers = True
            for index in positions:
                function = functions[index]
                # A tied layer with a `forward_fn` is called by partial(forward_fn, layer).
                is_tied = isinstance(function, partial)
                functions[index] = partial(function.func, layer, *function.args[1:]) if is_tied else layer
        return self._has_replaced_layers

    def check_weights(self, optimizer: Any, is_wrapped: bool) -> None:
        """Raise ReplacedWeightError for a weight that DeepSpeed's optimizer no longer steps.

        There are three causes. Either the module now holds a new Parameter, e.g. after `load_state_dict(assign=True)`.
        Or the Parameter was frozen or unfrozen after ZeRO or a half-precision optimizer (`is_wrapped`) took over the
        trainable weights. Or it has left the flat memory into which this optimizer writes new weights, e.g. after
        `p.data = new` or `module.to(dtype)`.
        """
        known = self._weights.union(weights_of(optimizer))
        names: dict[Tensor, str] = {p: name for name, p in self._module.named_parameters()}
        for p, name in names.items():
            if p.requires_grad and p not in known:
                raise ReplacedWeightError(
                    f"the weight {name} was replaced after tds.initialize() by a Parameter that no optimizer steps: "
                    f"{ADVICE}"
                )
            if is_wrapped and p in self._weights and p.requires_grad == (p in self._frozen):
                raise ReplacedWeightError(
                    f"the weight {name} was frozen or unfrozen after tds.initialize(), and the optimizer would ignore "
                    "that: call tds.initialize() again"
                )
        for weights, flat in flat_groups(optimizer):
            for weight in weights:
                # A weight that has left the module needs no check, and an empty one has no memory.
                if weight in names and weight.numel() and not same_storage(weight, flat):
                    raise ReplacedWeightError(
                        f"the storage of the weight {names[weight]} was replaced after tds.initialize(), and "
                        f"{type(optimizer).__name__} would keep stepping the old storage: call tds.initialize() again"
                    )


def _named_layers(module: Any) -> dict[str, nn.Module]:
    """Return the layers of a PipelineModule by their registered names; empty for another module."""
    found = {name: module.get_submodule(name) for name in getattr(module, "fwd_map", ())}
    # A PipelineModule, which has `forward_funcs`, keeps its tied layers apart from those in `fwd_map`.
    tied = module.tied_modules.items() if found or hasattr(module, "forward_funcs") else ()
    return found | {f"tied_modules.{key}": layer for key, layer in tied}


def _layer_in(function: Callable[..., Any]) -> Any:
    """Return the layer that an entry of `forward_funcs` runs.

    This is the entry itself or, for a tied layer with a `forward_fn`, the module bound in the partial.
    """
    return function.args[0] if isinstance(function, partial) and function.args else function

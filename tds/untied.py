"""Warnings about weights that layers on different stages share without a tie, so that each stage trains a copy."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ._deepspeed import LayerSpec, TiedLayerSpec
from .groups import gather_objects
from .pipe import ties

MAX_NAMED = 3  # weights that one warning names


class Holder(NamedTuple):
    """A built layer that holds a trainable weight, and the key of the tie that sums the weight's gradients."""

    weight: str
    layer: int
    tie: str | None


def warn_of_untied(module: Any, group: Any) -> None:
    """Warn, on rank 0, of each set of layers on several stages that hold the same trainable weights without a tie.

    Only weights that a built layer holds count: each LayerSpec may get the whole model and take its own part.
    module: a PipelineModule. group: the ranks of its stages. Collective over the group.
    """
    holders: dict[str, list[Holder]] = {}
    for stage in gather_objects(_find_holders(module), group):
        for each in stage:
            holders.setdefault(each.weight, []).append(each)
    if module.global_rank != 0:
        return
    names_by_layers: dict[tuple[int, ...], list[str]] = {}  # indices of layers -> weights that they train apart
    for name, weight_holders in holders.items():
        stages = {module.stage_owner(each.layer) for each in weight_holders}
        keys = {each.tie for each in weight_holders}
        # One tie sums the gradients of a weight over the stages of all its holders.
        is_tied = len(keys) == 1 and None not in keys
        if len(stages) > 1 and not is_tied:
            layers = tuple(sorted(each.layer for each in weight_holders))
            names_by_layers.setdefault(layers, []).append(name)
    for layers, names in names_by_layers.items():
        warnings.warn(_describe_untied(module, layers, names), stacklevel=4)


def _describe_untied(module: Any, layers: Sequence[int], names: Sequence[str]) -> str:
    """Return the warning that these layers, on several stages, share the weights `names` without a tie."""
    stages = sorted(set(map(module.stage_owner, layers)))
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(names[:MAX_NAMED])}{more} {verb} shared by the layers {', '.join(map(str, layers))}, which lie "
        f"on the stages {', '.join(map(str, stages))}: each stage trains a separate copy; use TiedLayerSpec to tie them"
    )


def _find_holders(module: Any) -> list[Holder]:
    """Return the trainable weights of this stage's layers that already existed before the layers were built.

    Such a weight is in the list of layers: in a layer given as a module, or in an argument of a LayerSpec. So several
    layers may have been given the same one.
    """
    names = _weight_names(module._layer_specs)  # weight -> its name, which is equal on all stages
    tie_of = {}  # weight -> key of its tie
    for key, _, weights in ties(module):
        for weight in weights.values():
            tie_of[weight] = key
    holders = []
    for index, layer in _built_layers(module):
        for weight in layer.parameters():
            if weight.requires_grad and weight in names:
                holders.append(Holder(names[weight], index, tie_of.get(weight)))
    return holders


def _built_layers(module: Any) -> Iterator[tuple[int, nn.Module]]:
    """Yield this stage's layers and their indices in the whole model."""
    # A stage of tds' PipelineModule may have several chunks, whose layers `indices` lists. DeepSpeed's has one range.
    indices = getattr(module, "indices", range(module._local_start, module._local_stop))
    for index, layer in zip(indices, module.forward_funcs, strict=True):
        spec = module._layer_specs[index]
        # The callable of a tied layer may be a partial of its `forward_fn`, so take its module from `tied_modules`.
        if isinstance(spec, TiedLayerSpec):
            yield index, module.tied_modules[spec.key]
        elif isinstance(layer, nn.Module):  # else a function, which has no weights
            yield index, layer
    last = len(module._layer_specs) - 1
    # The last stage trains the weights of a loss function.
    if isinstance(module.loss_fn, nn.Module) and module.stage_owner(last) == module.stage_id:
        yield last, module.loss_fn


def _weight_names(specs: Sequence[Any]) -> dict[nn.Parameter, str]:
    """Map each weight in the list of layers to a name that is the same on all stages."""
    names: dict[nn.Parameter, str] = {}
    for index, layer in enumerate(specs):
        if isinstance(layer, nn.Module):
            for name, weight in layer.named_parameters():
                names.setdefault(weight, f"{index}.{name}")
        elif isinstance(layer, LayerSpec):
            arguments = {**dict(enumerate(layer.module_args)), **layer.module_kwargs}  # by position or name
            for place, argument in arguments.items():
                for name, weight in _named_weights(argument, str(place)):
                    names.setdefault(weight, f"{name} of layer {index}")
    return names


def _named_weights(value: Any, place: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, weight) for the weights in an argument of a LayerSpec: a module, a weight, or a collection."""
    if isinstance(value, nn.Parameter):
        yield f"argument {place}", value
    elif isinstance(value, nn.Module):
        for name, weight in value.named_parameters():
            yield f"{name} of argument {place}", weight
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from _named_weights(each, f"{place}[{at}]")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_weights(each, f"{place}[{key!r}]")

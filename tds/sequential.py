"""A list of layers in one process, and initial values that do not depend on how layers are partitioned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from ._deepspeed import LayerSpec, TiedLayerSpec, around_each_layer, set_random_seed, this_device
from .nested import as_tuple


class SequentialModule(nn.Module):
    """A list of layers in one process, without a pipeline, e.g. for ZeRO-2, ZeRO-3 or text generation.

    The parameters have the same names as in a PipelineModule with the same list of layers. If both modules are built
    inside `seeded_layers` with the same seed, the parameters also have the same initial values.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        # One item per layer: (path of its module, its forward_fn or None), or (None, function). Paths are resolved at
        # each call, in case a user has replaced a module.
        self._layer_references: list[tuple[str | None, Any]] = []
        for index, layer in enumerate(layers):
            with _seed_for_layer(index):
                self._layer_references.append(self._build_layer(index, layer))

    def _build_layer(self, index: int, layer: Any) -> tuple[str | None, Any]:
        """Build and register a layer; return its item of `_layer_references`."""
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            return f"tied_modules.{layer.key}", layer.forward_fn
        if isinstance(layer, LayerSpec):
            layer = layer.build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
            return str(index), None
        return None, layer

    def forward(self, inputs: Any) -> Any:
        """Run all layers on the first layer's input, a value or a tuple, and return the last layer's output."""
        return run_layers(self.layer_functions, inputs)

    @property
    def layer_functions(self) -> list[Any]:
        """The layers and functions that the forward pass calls, in this order."""
        return [self._resolve(*each) for each in self._layer_references]

    def _resolve(self, path: str | None, function: Any) -> Any:
        """Return the callable of an item of `_layer_references`."""
        if path is None:
            return function
        module = self.get_submodule(path)
        return partial(function, module) if function else module


_seed: ContextVar[int | None] = ContextVar("seed of layers", default=None)


@contextmanager
def seeded_layers(seed: int) -> Iterator[None]:
    """Make the initialisation of layer i depend on (seed, i) only, not on partitioning or earlier layers.

    This also applies to the layers of DeepSpeed's own PipelineModule. Restores torch's CPU generator afterwards.
    """
    token = _seed.set(seed)
    try:
        with around_each_layer(_seed_for_layer):
            yield
    finally:
        _seed.reset(token)


@contextmanager
def _seed_for_layer(index: int) -> Iterator[None]:
    """Seed torch's CPU generator for layer number `index` inside the block, if `seeded_layers` is active."""
    seed = _seed.get()
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((seed + index * 1_000_003) % 2**63)  # a prime keeps pairs (seed, i) apart
        yield


def run_layers(funcs: Sequence[Any], inputs: Any) -> Any:
    """Return the output of layers that are called one after another. inputs: of the first layer, a value or a tuple."""
    for func in funcs:
        inputs = func(inputs)
    return inputs


def run_chunk(module: Any, inputs: Any, chunk: int) -> Any:
    """Return the output of one chunk of a stage, whose layers may be recomputed. module: a PipelineModule."""
    first, end = module.chunk_slices[chunk]
    layers = module.forward_funcs[first:end]
    funcs = _seeding_functions(module, layers) if module.seed_layers else layers
    interval = module.activation_checkpoint_interval  # number of layers to recompute together; 0: recompute none
    # Without recomputation, one part has all layers. The 1 is for an empty chunk: range() allows no step of 0.
    length = interval or len(funcs) or 1
    for start in range(0, len(funcs), length):
        part = funcs[start : start + length]
        if interval and torch.is_grad_enabled() and module._is_checkpointable(layers[start : start + length]):
            inputs = _recompute_layers(module, part, inputs)
        else:
            inputs = run_layers(part, inputs)
    return inputs


def _seeding_functions(module: Any, layers: Sequence[Any]) -> list[Any]:
    """Return functions that each seed the generators and run a layer, for the argument `seed_layers`.

    A seed is that of DeepSpeed without recomputation: it depends on the layer's index in the whole model and on the
    number of earlier forward passes.
    """
    module.micro_offset += 1
    # DeepSpeed adds 1 twice, too: the first forward pass has micro_offset 1 and the factor 2.
    first_seed = module.base_seed * (module.micro_offset + 1) + module._local_start
    set_seed = module.seed_fn or set_random_seed

    def run(seed: int, layer: Any, inputs: Any) -> Any:
        set_seed(seed)
        return layer(inputs)

    functions = []
    for seed, layer in enumerate(layers, first_seed):
        functions.append(partial(run, seed, layer))
    return functions


def _recompute_layers(module: Any, funcs: Sequence[Any], inputs: Any) -> Any:
    """Return the output of layers whose activations the backward pass recomputes."""
    # A checkpoint function takes each tensor as a separate argument.
    takes_tuple = isinstance(inputs, (tuple, list))
    returns_tuple = False  # `run` sets it

    def run(*tensors: Any) -> Any:
        nonlocal returns_tuple
        layer_inputs = tensors if takes_tuple else tensors[0]
        outputs = run_layers(funcs, layer_inputs)
        returns_tuple = isinstance(outputs, (tuple, list))
        return outputs

    # The recomputation, which the backward pass starts, must run under the torch.autocast of this forward pass.
    device = this_device().type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    outputs = module.activation_checkpoint_func(autocast(run), *as_tuple(inputs))
    return as_tuple(outputs) if returns_tuple else outputs  # DeepSpeed takes the only output out of its tuple


def chunk_of_weights(module: Any) -> dict[Any, int]:
    """Return the chunk of a pipeline stage that uses each parameter.

    If several chunks use a parameter, this is the first of them, whose backward pass comes last.
    """
    chunk_of: dict[Any, int] = {}
    for chunk, (begin, end) in enumerate(getattr(module, "chunk_slices", ())):
        for layer in module.forward_funcs[begin:end]:
            if hasattr(layer, "parameters"):  # a plain function has none
                for p in layer.parameters():
                    chunk_of.setdefault(p, chunk)
    return chunk_of

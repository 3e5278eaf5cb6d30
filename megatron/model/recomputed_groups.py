"""Recomputation of groups of layers in the backward pass (--checkpoint-activations)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from megatron import mpu

from .layers import Layer, Observer, Steps


def run_in_groups(
    steps: Steps, inputs: Any, max_layers: int, rng: mpu.RngStreams, observe: Observer | None = None
) -> Any:
    """Pass `inputs` through all steps in order; save only the inputs of groups of at most `max_layers` repeated layers.

    The backward pass recomputes each group. rng: dropout streams from which the layers draw; a recomputed group draws
    the same masks again. observe: runs each layer, or None.
    """
    layers = []
    calls = []
    for layer, call in steps:
        layers.append(layer)
        if observe is not None:
            call = partial(observe, layer, call)
        calls.append(call)
    begin = 0
    while begin < len(steps):
        end = _end_of_group(layers, begin, max_layers)
        if end > begin + 1 or layers[begin].repeated:  # else a single layer, such as an embedding, is not recomputed
            inputs = mpu.checkpoint(partial(_run_all, calls[begin:end]), inputs, rng=rng)
        else:
            inputs = calls[begin](inputs)
        begin = end
    return inputs


def _end_of_group(layers: Sequence[Layer], begin: int, max_layers: int) -> int:
    """Return the end of the recomputed group that starts at layer `begin` and has <= `max_layers` repeated layers."""
    end = begin
    count = 0
    while end < len(layers) and count < max_layers and (layers[end].repeated or layers[end].prelude):
        count += layers[end].repeated  # preludes do not count
        end += 1
    return max(end, begin + 1)  # a layer that is neither repeated nor a prelude is a group of its own


def _run_all(calls: Iterable[Callable[[Any], Any]], inputs: Any) -> Any:
    """Return the output of the last of `calls`, each of which gets the output of the one before."""
    for call in calls:
        inputs = call(inputs)
    return inputs

"""Recomputation of groups of layers in the backward pass (--checkpoint-activations)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from megatron import mpu

from .layers import Layer, Observer, Steps


def run_in_groups(steps: Steps, inputs: Any, most: int, rng: mpu.RngStreams, observe: Observer | None = None) -> Any:
    """Pass `inputs` through all steps in order; save only the inputs of groups of at most `most` repeated layers.

    The backward pass recomputes each group. rng: dropout streams from which the layers draw; a recomputed group draws
    the same masks again. observe: runs each layer, or None.
    """
    layers = [layer for layer, _ in steps]
    calls = [call if observe is None else partial(observe, layer, call) for layer, call in steps]
    at = 0
    while at < len(steps):
        end = _end_of_group(layers, at, most)
        if end > at + 1 or layers[at].repeated:
            inputs = mpu.checkpoint(partial(_run_all, calls[at:end]), inputs, rng=rng)
        else:
            inputs = calls[at](inputs)
        at = end
    return inputs


def _end_of_group(layers: Sequence[Layer], at: int, most: int) -> int:
    """Return the end of the recomputed group that starts at layer `at` and has at most `most` repeated layers."""
    end = at
    count = 0
    while end < len(layers) and count < most and (layers[end].repeated or layers[end].prelude):
        count += layers[end].repeated
        end += 1
    return max(end, at + 1)


def _run_all(calls: Iterable[Callable[[Any], Any]], inputs: Any) -> Any:
    for call in calls:
        inputs = call(inputs)
    return inputs

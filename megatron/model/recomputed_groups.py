"""Recomputation of groups of layers in the backward pass (--checkpoint-activations)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron import mpu

from .layers import Steps


def run_in_groups(
    run: Callable[[Steps, Any], Any], steps: Steps, inputs: Any, max_layers: int, rng: mpu.RngStreams
) -> Any:
    """Pass `inputs` through all steps in order; save only the inputs of groups of at most `max_layers` repeated layers.

    The backward pass recomputes each group. run: passes inputs through some of the steps. rng: dropout streams from
    which the layers draw; a recomputed group draws the same masks again.
    """
    begin = 0
    while begin < len(steps):
        end = _end_of_group(steps, begin, max_layers)
        run_group = partial(run, steps[begin:end])
        # A single layer that is not repeated, such as an embedding, is not recomputed.
        is_recomputed = end > begin + 1 or steps[begin][0].repeated
        if is_recomputed:
            inputs = mpu.checkpoint(run_group, inputs, rng=rng)
        else:
            inputs = run_group(inputs)
        begin = end
    return inputs


def _end_of_group(steps: Steps, begin: int, max_layers: int) -> int:
    """Return the end of the recomputed group that starts at step `begin` and has <= `max_layers` repeated layers."""
    # With max_layers 2, the steps prelude, layer, prelude, layer, prelude, layer have groups of 4 and of 2 steps.
    end = begin
    num_repeated = 0
    for layer, _ in steps[begin:]:
        if num_repeated == max_layers or not (layer.repeated or layer.prelude):
            break
        num_repeated += layer.repeated  # True counts as 1; a prelude, which is not repeated, does not count
        end += 1
    return max(end, begin + 1)  # a layer that is neither repeated nor a prelude is a group of its own

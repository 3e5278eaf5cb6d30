"""Cuts of a list of layers into pipeline stages of about the same work."""

from collections.abc import Sequence
from typing import Any

from megatron.config import Config
from tds.layer_times import cut_by_time

from .layers import Layer

# Work of a layer's forward and backward pass, in units of its forward pass: without and with recomputation.
FORWARD_AND_BACKWARD = 3
FORWARD_TWICE_AND_BACKWARD = 4


def partition_method(layers: Sequence[Layer], config: Config) -> Any:
    """Return the partition method of --partition-method, as tds knows it."""
    p = config.parallel
    if p.partition_method == "measured":
        return "balanced"  # the name that tds has for this method
    num_ranges = p.stages * p.virtual_pipeline_size if p.stages > 1 else 1  # chunks need a pipeline
    if p.partition_method == "balanced" and len(layers) >= num_ranges:
        return balanced_cuts(layers, num_ranges, bool(config.recomputed_layers))
    return p.partition_method


def balanced_cuts(layers: Sequence[Layer], num_ranges: int, recomputed: bool) -> list[int]:
    """Cut the layers into ranges such that the heaviest range has the least possible work.

    Returns the start of each range, followed by the number of layers.
    num_ranges: number of ranges. recomputed: whether repeated layers run forward twice.
    Layers without counted work (an embedding, a norm, a table of positions) stay with the layer after them,
    unless there are more ranges than layers with work. If no layer has counted work, all layers weigh the
    same.
    """
    ends = [end for end, layer in enumerate(layers, start=1) if layer.work]
    has_work = bool(ends)
    # With too few layers of work, or without work in the last one, each layer is a unit of its own.
    if len(ends) < num_ranges or ends[-1] < len(layers):
        ends = list(range(1, len(layers) + 1))
    costs = []
    for end in ends:
        layer = layers[end - 1]
        passes = FORWARD_TWICE_AND_BACKWARD if recomputed and layer.repeated else FORWARD_AND_BACKWARD
        costs.append(float(layer.work * passes) if has_work else 1.0)
    _, *cuts = cut_by_time(costs, num_ranges)  # the first range begins at 0
    return [0, *(ends[cut - 1] for cut in cuts)]

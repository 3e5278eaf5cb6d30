"""Cuts of a list of layers into pipeline stages of about the same work."""

from collections.abc import Sequence
from typing import Any

from megatron.config import Config
from megatron.config.fields import ConfigError
from tds.layer_times import cut_by_time

from .layers import Layer

# Work of a layer's forward and backward pass, in units of its forward pass: without and with recomputation.
FORWARD_AND_BACKWARD = 3
FORWARD_TWICE_AND_BACKWARD = 4


def partition_method(layers: Sequence[Layer], config: Config) -> Any:
    """Return the partition method of --partition-method, as tds knows it."""
    p = config.parallel
    method = p.partition_method
    if method == "measured":
        return "balanced"  # the name that tds has for this method
    num_ranges = p.stages * p.chunks
    if method == "balanced" and len(layers) >= num_ranges:
        return balanced_cuts(layers, num_ranges, bool(config.recomputed_layers))
    return listed_cuts(method, num_ranges, len(layers)) or method


def listed_cuts(text: str, num_ranges: int, num_layers: int) -> list[int] | None:
    """Return the start of each range, followed by the number of layers, from a list of --partition-method.

    The list, such as 0,4 or 0,4,8, may omit the number of layers. Returns None if `text` is the name of a method.
    Raises ConfigError for a list that does not divide the layers into `num_ranges` ranges.
    """
    if not text.replace(",", "").replace(" ", "").isdecimal():
        return None
    cuts = [int(word) for word in text.split(",") if word.strip()]
    if num_ranges == 1:
        cuts = [0]  # there is nothing to divide
    if len(cuts) == num_ranges:
        cuts.append(num_layers)
    covers_all_layers = cuts[0] == 0 and cuts[-1] == num_layers
    if len(cuts) != num_ranges + 1 or not covers_all_layers or cuts != sorted(set(cuts)):
        raise ConfigError(
            f"--partition-method {text} does not divide {num_layers} layers into {num_ranges} ranges: list the first "
            f"layer of each range, {num_ranges} ascending numbers from 0"
        )
    return cuts


def balanced_cuts(layers: Sequence[Layer], num_ranges: int, recomputed: bool) -> list[int]:
    """Cut the layers into ranges such that the heaviest range has the least possible work.

    Returns the start of each range, followed by the number of layers.
    num_ranges: number of ranges. recomputed: whether repeated layers run forward twice.
    Layers without counted work (an embedding, a norm, a table of positions) stay with the layer after them,
    unless there are more ranges than layers with work. If no layer has counted work, all layers weigh the
    same.
    """
    # A unit is a layer with work and the layers without work before it. For example, if the layers have the work
    # [0, 5, 5, 0, 9], the units end at the layers 2, 3 and 5, and cost as much as 5, 5 and 9.
    ends = [end for end, layer in enumerate(layers, start=1) if layer.work]
    has_work = bool(ends)
    # If there are fewer units than ranges, or if layers follow the last unit, each layer is a unit of its own instead.
    if len(ends) < num_ranges or ends[-1] < len(layers):
        ends = list(range(1, len(layers) + 1))
    costs = []
    for end in ends:
        layer = layers[end - 1]
        cost = 1.0
        if has_work:
            passes = FORWARD_TWICE_AND_BACKWARD if recomputed and layer.repeated else FORWARD_AND_BACKWARD
            cost = float(layer.work * passes)
        costs.append(cost)
    # Unit i begins at layer begins[i], where the unit before it ends. With the ends 2, 3 and 5, `begins` is 0 2 3 5,
    # and the cuts 0 2 3 of units are the cuts 0 3 5 of layers.
    begins = [0, *ends]
    return [begins[cut] for cut in cut_by_time(costs, num_ranges)]

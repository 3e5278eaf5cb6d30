"""Measurement of each layer's time, and partitions in which all stages take similar time."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ._deepspeed import synchronize
from .memory import non_leaf_view
from .nested import as_tuple, in_full, map_tensors, to_device

ROUNDS = 4  # measured passes per layer, after a warm-up


def layer_times(layers: Sequence[Any], example: Any, device: torch.device) -> list[float]:
    """Return for each layer the seconds of its forward plus backward pass on the slowest rank.

    The result is equal on every rank. Layers are built one at a time and discarded. All ranks measure the same layer at
    the same time, so a layer can communicate with its tensor-parallel peers. example: an input of the first layer.
    """
    seconds = []
    inputs = to_device(example, device)
    # Building and measuring layers must not change the random numbers of the run.
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for layer in layers:
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(module, nn.Module):
                module.to(device)
            function = module
            if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
                function = partial(layer.forward_fn, module)
            _time_layer(function, inputs, device)  # warm-up
            rounds = [_time_layer(function, inputs, device) for _ in range(ROUNDS)]
            seconds.append(statistics.median(elapsed for elapsed, _ in rounds))
            inputs = rounds[-1][1]  # the outputs of this layer
            if isinstance(module, nn.Module):
                module.zero_grad(set_to_none=True)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def _time_layer(function: Any, inputs: Any, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a forward and backward pass, and the detached outputs."""
    inputs = map_tensors(inputs, lambda t: non_leaf_view(t.detach().clone().requires_grad_(t.is_floating_point())))
    synchronize(device)
    begin = time.perf_counter()
    outputs = in_full(function(inputs))
    roots = [t for t in as_tuple(outputs) if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    synchronize(device)
    return time.perf_counter() - begin, map_tensors(outputs, Tensor.detach)


def cut_by_time(seconds: Sequence[float], groups: int) -> list[int]:
    """Return the partition of the layers into non-empty groups that minimises the slowest group's time.

    Among several such partitions, choose the one with the most even times. The result lists the first layer of each
    group, followed by the number of layers.
    """
    # The cost of a partition is at first the time of its slowest group. Then, among the partitions in which no group is
    # slower than that, the cost is the sum of the squared times, which is lowest if the times are most even.
    slowest = _best_cuts(seconds, groups, lambda cost, last: max(cost, last))[0]
    limit = slowest * (1 + 1e-9)  # the tolerance is for rounding errors of the sums
    return _best_cuts(seconds, groups, lambda cost, last: cost + (last * last if last <= limit else float("inf")))[1]


def _best_cuts(seconds: Sequence[float], groups: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the minimum cost of a partition into `groups` groups, and this partition in the form of `cut_by_time`.

    add: function (cost of some groups, seconds of one more group) -> cost of all these groups together.
    """
    count = len(seconds)
    seconds_before = [0.0, *accumulate(seconds)]
    best = {0: (0.0, [0])}  # number of layers in the groups so far -> (their minimum cost, their cuts)
    for groups_left in reversed(range(groups)):
        longer = {}
        # Each group has a layer, so the groups so far have at least one each, and leave one for each of the others.
        for end in range(groups - groups_left, count - groups_left + 1):
            options = []
            for start, (cost, cuts) in best.items():
                if start < end:
                    options.append((add(cost, seconds_before[end] - seconds_before[start]), [*cuts, end]))
            longer[end] = min(options)
        best = longer
    return best[count]

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

from ._deepspeed import finish
from .memory import non_leaf_view
from .nested import as_tuple, each_tensor, in_full, to_device

ROUNDS = 4  # measured passes per layer, after a warm-up


def layer_times(layers: Sequence[Any], example: Any, device: torch.device) -> list[float]:
    """Return for each layer the seconds of its forward plus backward pass on the slowest rank.

    The result is equal on every rank. Layers are built one at a time and discarded. All ranks measure the same layer at
    the same time, so a layer can communicate with its tensor-parallel peers. example: an input of the first layer.
    """
    seconds = []
    inputs = to_device(example, device)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for layer in layers:
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(module, nn.Module):
                module.to(device)
            call = module
            if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
                call = partial(layer.forward_fn, module)
            _measure(call, inputs, device)  # warm-up
            rounds = [_measure(call, inputs, device) for _ in range(ROUNDS)]
            seconds.append(statistics.median(took for took, _ in rounds))
            inputs = rounds[-1][1]
            if isinstance(module, nn.Module):
                module.zero_grad(set_to_none=True)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def _measure(call: Any, inputs: Any, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a forward and backward pass, and the detached outputs."""
    inputs = each_tensor(inputs, lambda t: non_leaf_view(t.detach().clone().requires_grad_(t.is_floating_point())))
    finish(device)
    begin = time.perf_counter()
    outputs = in_full(call(inputs))
    learning = [t for t in as_tuple(outputs) if t.requires_grad]
    if learning:
        torch.autograd.backward(learning, [torch.ones_like(t) for t in learning])
    finish(device)
    return time.perf_counter() - begin, each_tensor(outputs, Tensor.detach)


def cut_by_time(seconds: Sequence[float], groups: int) -> list[int]:
    """Return the partition of the layers into non-empty groups that minimises the slowest group's time.

    Among several such partitions, choose the one with the most even times. The result lists the first layer of each
    group, followed by the number of layers.
    """
    slowest = _cut(seconds, groups, lambda most, took: max(most, took))[0]
    limit = slowest * (1 + 1e-9)
    return _cut(seconds, groups, lambda total, took: total + (took * took if took <= limit else float("inf")))[1]


def _cut(seconds: Sequence[float], groups: int, join: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the minimum cost of a partition into `groups` groups, and this partition in the form of `cut_by_time`.

    join: function (cost of some groups, seconds of one more group) -> cost of all these groups together.
    """
    count = len(seconds)
    total = [0.0, *accumulate(seconds)]
    best = {0: (0.0, [0])}  # number of layers in the groups so far -> (their minimum cost, their cuts)
    for left in reversed(range(groups)):
        longer = {}
        for end in range(groups - left, count - left + 1):
            ways = []
            for start, (cost, cuts) in best.items():
                if start < end:
                    ways.append((join(cost, total[end] - total[start]), [*cuts, end]))
            longer[end] = min(ways)
        best = longer
    return best[count]

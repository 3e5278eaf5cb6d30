"""Partition of a PipelineModule into groups of layers, and measured times of the layers for balanced partitions."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import LayerSpec, TiedLayerSpec, partition_balanced, partition_uniform, this_device
from .memory import non_leaf_view
from .nested import as_tuple, in_full, map_tensors, to_device

ROUNDS = 4  # measured passes per layer, after a warm-up


def layer_times(layers: Sequence[Any], example: Any, device: torch.device) -> list[float]:
    """Return for each layer the seconds of its forward plus backward pass on the slowest rank.

    The result is equal on every rank. Layers are built one at a time and discarded. A layer that is given as a module
    keeps its buffers. All ranks measure the same layer at the same time, so a layer can communicate with its
    tensor-parallel peers. example: an input of the first layer.
    """
    seconds = []
    inputs = to_device(example, device)
    # Building and measuring layers must not change the random numbers of the run.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        for layer in layers:
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(module, nn.Module):
                module.to(device)
            function = module
            if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
                function = partial(layer.forward_fn, module)
            with _unchanged_buffers(module):
                rounds = []
                for _ in range(1 + ROUNDS):
                    elapsed, outputs = _time_layer(function, inputs, device)
                    rounds.append(elapsed)
            seconds.append(statistics.median(rounds[1:]))  # the first round is the warm-up
            inputs = outputs
            if isinstance(module, nn.Module):
                module.zero_grad()
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


@contextmanager
def _unchanged_buffers(layer: Any) -> Iterator[None]:
    """Restore the buffers of `layer` at the end, such as the statistics of a BatchNorm. A plain function has none."""
    saved = []
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        for name, buffer in module.named_buffers(recurse=False):
            saved.append((module, name, buffer, buffer.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in saved:
                setattr(module, name, buffer)  # the forward pass may have assigned another tensor
                # copy_() would fail for an expanded buffer, which a layer can hardly change in place.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _time_layer(function: Any, inputs: Any, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of a forward and backward pass, and the detached outputs."""

    def fresh(t: Tensor) -> Tensor:
        leaf = t.detach().clone()
        # A layer may modify its input in place, which autograd forbids for a leaf that requires a gradient.
        return non_leaf_view(leaf.requires_grad_(t.is_floating_point()))

    inputs = map_tensors(inputs, fresh)
    _synchronize(device)
    begin = time.perf_counter()
    outputs = in_full(function(inputs))
    roots = [t for t in as_tuple(outputs) if t.requires_grad]
    if roots:  # any gradients serve for a measurement
        torch.autograd.backward(roots, list(map(torch.ones_like, roots)))
    _synchronize(device)
    elapsed = time.perf_counter() - begin
    return elapsed, map_tensors(outputs, Tensor.detach)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def cut_by_time(seconds: Sequence[float], groups: int) -> list[int]:
    """Return the partition of the layers into non-empty groups that minimises the slowest group's time.

    Among several such partitions, choose the one with the most even times. The result lists the first layer of each
    group, followed by the number of layers.
    """
    # The cost of a partition is at first the time of its slowest group. Then, among the partitions in which no group is
    # slower than that, the cost is the sum of the squared times, which is lowest if the times are most even.
    slowest, _ = _best_cuts(seconds, groups, max)
    limit = slowest * (1 + 1e-9)  # the tolerance is for rounding errors of the sums

    def add_square(cost: float, last: float) -> float:
        return cost + last * last if last <= limit else float("inf")

    _, cuts = _best_cuts(seconds, groups, add_square)
    return cuts


def _best_cuts(seconds: Sequence[float], groups: int, add: Callable[[float, float], float]) -> tuple[float, list[int]]:
    """Return the minimum cost of a partition into `groups` groups, and this partition in the form of `cut_by_time`.

    add: function (cost of some groups, seconds of one more group) -> cost of all these groups together.
    """
    # Dynamic programming: from the best partitions of the first layers into g groups follow those into g + 1 groups.
    count = len(seconds)
    seconds_before = [0.0, *accumulate(seconds)]
    best = {0: (0.0, [0])}  # number of layers in the groups so far -> (their minimum cost, their cuts)
    for number in range(1, groups + 1):  # number of groups so far, with the next one
        with_next_group = {}
        # Each group has a layer, so the groups so far have at least one each, and leave one for each of the others.
        for end in range(number, count - groups + number + 1):
            options = []
            for start, (cost, cuts) in best.items():
                if start < end:  # the next group has the layers from `start` to `end`
                    group_seconds = seconds_before[end] - seconds_before[start]
                    options.append((add(cost, group_seconds), [*cuts, end]))
            with_next_group[end] = min(options)  # the lowest cost; of equal costs, the earliest cuts
        best = with_next_group
    return best[count]


def choose_cuts(module: Any, method: str | Sequence[int]) -> list[int]:
    """Return the index of each group's first layer, followed by the number of layers.

    For example, [0, 3, 7] cuts 7 layers into a group of 3 and a group of 4. module: a PipelineModule.
    """
    count = len(module._layer_specs)
    groups = module.num_stages * module.chunks
    if count < groups:
        raise ValueError(f"{count} layers cannot be cut into {groups} groups: use fewer stages or chunks")
    if method == "balanced":
        if module._example is None:
            raise ValueError("partition_method 'balanced' measures the layers: give `example`, an input of layer 0")
        return cut_by_time(layer_times(module._layer_specs, module._example, this_device()), groups)
    # Cuts may be a list or text, [0, 3, 7] or "0,3,7". As text, one test separates both from names like "uniform".
    text = method if isinstance(method, str) else ",".join(map(str, method))
    if not text.replace(",", "").replace(" ", "").isdigit():  # a name, not cuts such as "0,3,7"
        return _named_cuts(module, text, groups)
    cuts = list(map(int, text.split(",")))
    if len(cuts) != groups + 1 or cuts[0] != 0 or cuts[-1] != count or sorted(cuts) != cuts:
        raise ValueError(
            f"the cuts {cuts} do not divide {count} layers into {groups} groups: give "
            f"{groups + 1} rising numbers from 0 to {count}"
        )
    return cuts


def _named_cuts(module: Any, method: str, groups: int) -> list[int]:
    """Return the cuts of one of DeepSpeed's partition methods."""
    count = len(module._layer_specs)
    lower = method.lower()
    if lower == "uniform":
        cuts = partition_uniform(count, groups)
    elif lower == "parameters":
        cuts = partition_balanced(module._count_layer_params(), groups)
    elif lower.startswith("type:"):
        matching = set(module._find_layer_type(method.split(":", 1)[1]))
        weights = [int(i in matching) for i in range(count)]  # 1 for a matching layer, 0 for any other
        cuts = partition_balanced(weights, groups)
    else:
        raise ValueError(
            f"there is no partition_method {method!r}; use uniform, parameters, type:REGEX, balanced or a list of cuts"
        )
    return list(map(int, cuts))  # numbers of numpy would be no valid seeds of `seed_layers`

"""The engines under test, and the same layers in one process to compare them with."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .cases import MICROS, ROWS, STEPS, Case

LR = 0.3


def reference(case: Case, dtype: torch.dtype) -> tuple[list[float], list[nn.Module]]:
    """The losses of each step, and the layers as they are then. SGD, since Adam hides constant factors."""
    layers = [layer.to(dtype) for layer in case.build()]
    methods = {i: tie.method for i, tie in case.ties if tie.method}
    calls = [getattr(layer, methods[i]) if i in methods else layer for i, layer in enumerate(layers)]
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=LR)
    count = getattr(case.loss, "count_targets", None)
    found = []
    for step in range(STEPS):
        batches = list(case.batches(step, dtype))
        total: Any = 0.0
        for inputs, labels in batches:
            for call in calls:
                inputs = call(inputs)
            loss = case.loss(inputs, labels)
            total = total + (sum(loss.values()) if isinstance(loss, dict) else loss)
        total = total / (sum(count(labels) for _, labels in batches) if count else len(batches))
        optimizer.zero_grad()
        total.backward()
        if case.clip:
            nn.utils.clip_grad_norm_(parameters, case.clip)
        optimizer.step()
        found.append(total.item())
    return found, layers


def _specs(case: Case) -> list[Any]:
    from deepspeed.pipe import TiedLayerSpec

    built, ties = case.build(), dict(case.ties)
    specs: list[Any] = list(built)
    for index, tie in ties.items():
        attributes = [name for name, _ in built[index].named_parameters()]
        forward = None if tie.method is None else _Method(tie.method)
        specs[index] = TiedLayerSpec(tie.key, _Same, built[index], forward_fn=forward, tied_weight_attr=attributes)
    return specs


class _Same(nn.Module):
    """For a spec, which wants a class: `_Same(module)` is the module itself."""

    def __new__(cls, module: nn.Module) -> nn.Module:  # type: ignore[misc]
        return module


class _Method:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        return getattr(module, self.name)(inputs)


def _topology(stages: int, tensor: int) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=1)


def train(
    engine_name: str, case: Case, stages: int, tensor: int, pipeline: dict[str, Any], dtype: torch.dtype
) -> tuple[float, float]:
    """Largest relative error of a loss, and of a weight of this rank, against one process. engine_name: tds or stock."""
    import deepspeed

    import tds
    from megatron.zero_state import use_fp64
    from tds._deepspeed import StockPipelineModule, quietly

    stock = engine_name == "stock"
    module, initialize = (StockPipelineModule, deepspeed.initialize) if stock else (tds.PipelineModule, tds.initialize)
    more = {"chunks": 2} if pipeline.get("schedule") == "interleaved" else {}
    config = {
        "train_batch_size": ROWS * MICROS, "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True, "pipeline": pipeline, "steps_per_print": 10**9,
    }  # fmt: skip
    with quietly():
        model = module(_specs(case), topology=_topology(stages, tensor), loss_fn=case.loss, partition_method="uniform",
                       activation_checkpoint_interval=case.checkpoint, **more)  # fmt: skip
        for name, value in case.declared:
            setattr(model, name, value)
        parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]  # a stage may have none
        engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=LR), config=config)
    assert stock or type(engine) is tds.PipelineEngine
    if dtype is torch.float64:
        use_fp64(engine)
    found = []
    for step in range(STEPS):
        with quietly():
            found.append(engine.train_batch(case.batches(step, dtype)).item())
        if not stock:  # evaluation at another size, between two steps
            engine.eval_batch(_short(case, dtype), num_micro_batches=2)
    expected, layers = reference(case, dtype)
    losses = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return losses, _weights_differ(model, layers)


def _short(case: Case, dtype: torch.dtype) -> Iterator[Any]:
    for inputs, labels in case.batches(0, dtype):
        yield inputs[:1], labels[:1]


def _weights_differ(model: Any, layers: list[nn.Module]) -> float:
    """Largest |difference| / largest |weight| over the parameters of this rank."""
    indices = getattr(model, "indices", None) or range(model._local_start, model._local_stop)
    worst = 0.0
    for index, call in zip(indices, model.forward_funcs, strict=True):
        mine = call.args[0] if isinstance(call, partial) else call
        for ours, theirs in zip(mine.parameters(), layers[index].parameters(), strict=True):
            worst = max(worst, _differ(ours.detach(), theirs.detach()))
    return worst


def _differ(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@contextmanager
def remembered_groups() -> Iterator[Any]:
    """Let many engines of one process share process groups; call what is given before each of them."""
    made: dict[tuple[int, ...], list[Any]] = {}
    used: dict[tuple[int, ...], int] = {}
    new_group = dist.new_group

    def remember(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        groups, used[key] = made.setdefault(key, []), used.get(key, 0) + 1
        if used[key] > len(groups):
            groups.append(new_group(list(key), *args, **kwargs))
        return groups[used[key] - 1]

    dist.new_group = remember
    try:
        yield used.clear
    finally:
        dist.new_group = new_group

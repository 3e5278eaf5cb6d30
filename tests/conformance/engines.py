"""Training of a conformance case: by a pipeline engine, and by plain torch in one process as the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tds._deepspeed import StockPipelineModule, quietly
from tds.optimizer_state import use_fp64

from .cases import ROWS, Case
from .probes import Trained


def reference(case: Case, dtype: torch.dtype, replicas: int = 1) -> tuple[list[float], list[nn.Module], list[Any]]:
    """Train a case in one process; return each step's loss, the layers, and the function that applies each layer."""
    layers = [layer.to(dtype) for layer in case.build()]
    methods = {i: tie.method for i, tie in case.ties if tie.method}
    calls = [getattr(layer, methods[i]) if i in methods else layer for i, layer in enumerate(layers)]
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    optimizer = case.optimizer(parameters)
    count = getattr(case.loss, "count_targets", None)
    found = []
    for step in range(len(case.rows)):
        batches = [batch for replica in range(replicas) for batch in case.expected(step, dtype, replica)]
        total: Any = 0.0
        for inputs, labels in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
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
    return found, layers, calls


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
    """A class to pass to TiedLayerSpec with a module that is built already: `_Same(module)` is `module`."""

    def __new__(cls, module: nn.Module) -> nn.Module:  # type: ignore[misc]
        return module


class _Method:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, inputs: Any) -> Any:
        return getattr(module, self.name)(inputs)


def _topology(stages: int, tensor: int, replicas: int) -> Any:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    return PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas)


def train(
    engine_name: str,
    case: Case,
    stages: int,
    tensor: int,
    pipeline: dict[str, Any],
    dtype: torch.dtype,
    replicas: int = 1,
    cuts: str = "uniform",
) -> tuple[float, float]:
    """Train a case; return (largest relative error of a step's loss, largest relative error of this rank's weights).

    The errors are deviations from `reference`. The first one is infinite if the case has a probe, a check of the
    trained engine, and the probe fails. engine_name: "tds", or "stock" for DeepSpeed's own engine.
    """
    engine, model = _build(engine_name, case, stages, tensor, pipeline, replicas, cuts)
    if dtype is torch.float64:
        use_fp64(engine)
    replica, found = engine.grid.data_parallel_id, []
    for batches in case.feeds(dtype, replica):
        with quietly():
            found.append(engine.train_batch(batches).item())
        if engine_name != "stock" and not case.probe:  # evaluation in other batch sizes must not affect training
            engine.eval_batch(_short(case, dtype), num_micro_batches=min(2, len(case.rows[0])))
    expected, layers, calls = reference(case, dtype, replicas)
    losses = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    weights = _weights_differ(model, layers)
    if case.probe:
        with quietly():
            right = case.probe(Trained(engine, calls, case.expected(0, dtype, replica), case.loss, dtype))
        losses = losses if right else float("inf")
    return losses, weights


def _build(
    engine_name: str, case: Case, stages: int, tensor: int, pipeline: dict[str, Any], replicas: int, cuts: str
) -> tuple[Any, Any]:
    stock = engine_name == "stock"
    module, initialize = (StockPipelineModule, deepspeed.initialize) if stock else (tds.PipelineModule, tds.initialize)
    micros = len(case.rows[0])
    more = {"chunks": 2} if pipeline.get("schedule") == "interleaved" else {}
    config = {
        "train_batch_size": ROWS * micros * replicas, "train_micro_batch_size_per_gpu": ROWS, "pipeline": pipeline,
        "gradient_clipping": case.clip, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9, **case.config,
    }  # fmt: skip
    with quietly():
        model = module(
            _specs(case), topology=_topology(stages, tensor, replicas), loss_fn=case.loss, partition_method=cuts,
            activation_checkpoint_interval=case.checkpoint, **more, **case.module,
        )  # fmt: skip
        for name, value in case.declared:
            setattr(model, name, value)
        if case.prepare:
            case.prepare(model)
        parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]  # optimizers need a parameter
        how = (
            {"model_parameters": parameters}
            if "optimizer" in case.config
            else {"optimizer": case.optimizer(parameters)}
        )
        engine, *_ = initialize(model=model, config=config, **how)
    assert stock or type(engine) is tds.PipelineEngine
    return engine, model


def _short(case: Case, dtype: torch.dtype) -> Iterator[Any]:
    for inputs, labels in case.batches(0, dtype):
        yield inputs[:1], labels[:1]


def _weights_differ(model: Any, layers: list[nn.Module]) -> float:
    """Return the largest relative error of this rank's weights; a weight's error is max |difference| / max |weight|."""
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
    """Let engines that are built one after another in this context reuse process groups.

    Yield a function that the caller must call before building each engine.
    """
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

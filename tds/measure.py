"""Measurement of DeepSpeed's gradient scaling, by one optimizer step of a tiny model.

The engines of tds multiply losses by the factor by which DeepSpeed will divide gradients: accumulation steps,
replicas, and the fp16 loss scale. This factor differs between releases and settings of DeepSpeed. With a wrong factor,
a run would silently train on wrong gradients. So the measurement uses the same code path of DeepSpeed as the run.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._deepspeed import BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer, StockPipelineEngine, deepspeed
from .base_engine import Engine
from .optimizer_state import disable_reduction, get_weight

SIZE = 64
GRADIENT = 2.0**-10  # small enough for fp16 with a loss scale of 2**8
TOLERANCE = 0.02  # relative error; bf16 rounds by up to 0.4%, while a wrong factor is wrong by a factor of 2 or more
COPIED_KEYS = (
    "bf16",
    "data_types",
    "torch_autocast",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
)
COPIED_ZERO_KEYS = "reduce_scatter", "contiguous_gradients", "overlap_comm", "round_robin_gradients"
_verified: set[str] = set()


class _ProbeModel(nn.Module):
    """A model of SIZE weights. The gradient of each weight is the model's input `factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.weight.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's norms then count it on every rank

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


class _PipelineProbe(Engine):
    """A DeepSpeed engine for `_ProbeModel` that reduces gradients and steps like a pipeline engine."""

    _exec_reduce_grads = StockPipelineEngine._exec_reduce_grads
    _bf16_reduce_grads = StockPipelineEngine._bf16_reduce_grads
    is_gradient_accumulation_boundary = StockPipelineEngine.is_gradient_accumulation_boundary
    pipeline_enable_backward_allreduce, _force_grad_boundary = True, False

    def run_step(self: Any, factor: float, micros: int) -> None:
        """Take one optimizer step of `micros` micro-batches, with the calls of PipelineEngine and Bf16Reduction."""
        # DeepSpeed's bf16 optimizer adds the bf16 gradients of each micro-batch ("lp", low precision) to fp32 sums
        # ("hp", high precision), unless it does so as soon as autograd has a gradient.
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16_Optimizer)
        for _ in range(micros):
            loss = self.module(factor)
            if self.using_bf16_optimizer:
                self.optimizer.clear_lp_grads()
            if self.fp16_enabled():
                loss = self.scale(loss)
            torch.autograd.backward([loss])
            if self.using_bf16_optimizer and not self.optimizer.immediate_grad_update:
                self.optimizer.update_hp_grads(clear_lp_grads=False)
        self._exec_reduce_grads()
        self._force_grad_boundary = True  # the micro-batches of this step are complete
        self._take_model_step({})


class _PlainProbe(Engine):
    """A DeepSpeed engine for `_ProbeModel` without a pipeline: the caller uses backward() and step()."""

    def run_step(self: Any, factor: float, micros: int) -> None:
        """Take one optimizer step of `micros` micro-batches."""
        for _ in range(micros):
            self.backward(self(factor))
            self.step()


def _probe_config(engine: Any, micros: int, own_reduction: bool) -> dict[str, Any]:
    """Return a ds_config with the settings of `engine` that affect gradient scaling.

    micros: accumulation steps. own_reduction: the caller reduces gradients over the replicas, not DeepSpeed.
    """
    ds_config = engine._config._param_dict
    # DeepSpeed allows bf16 with fp32 accumulation only under ZeRO. But if the caller reduces gradients itself, the
    # measurement runs without ZeRO, so leave both settings out.
    left_out = ("bf16", "data_types") if own_reduction else ()
    settings = {key: ds_config[key] for key in COPIED_KEYS if key in ds_config and key not in left_out}
    zero: dict[str, Any] = {"stage": 0}
    if not own_reduction:
        zero_settings = ds_config.get("zero_optimization")
        if isinstance(zero_settings, dict):
            zero |= {key: zero_settings[key] for key in COPIED_ZERO_KEYS if key in zero_settings}
        zero["stage"] = int(engine.zero_optimization_stage())
    # DeepSpeed allocates buckets of the given number of elements, by default 5e8.
    zero |= {"reduce_bucket_size": SIZE, "allgather_bucket_size": SIZE, "stage3_prefetch_bucket_size": SIZE}
    settings |= {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micros,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if engine.fp16_enabled():
        # A loss scale of 2**8, with which the small gradients of the measurement do not overflow.
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return settings


def _measure_gradient(
    engine: Any, settings: dict[str, Any], factor: float, own_reduction: bool, pipeline: bool
) -> float:
    """Return the gradient that DeepSpeed applies, i.e. the change of a weight in one SGD step with learning rate 1.

    settings: a ds_config. factor: the gradient of each micro-batch before DeepSpeed scales it. own_reduction, pipeline:
    see `check_factor`.
    """
    model = _ProbeModel()
    probe_class = _PipelineProbe if pipeline else _PlainProbe
    probe = probe_class(
        args=None,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=settings,
        config_class=deepspeed.DeepSpeedConfig(settings, engine.mpu),
        mpu=engine.mpu,
        dist_init_required=False,
    )
    if pipeline or own_reduction:
        disable_reduction(probe)  # as a pipeline engine does, or the caller has done in `engine`
    probe.run_step(factor, settings["gradient_accumulation_steps"])
    gradient = -get_weight(model.weight)[0].item()  # the weight was 0 before the step
    probe.destroy()
    return gradient


def _describe_route(engine: Any) -> str:
    """Describe the settings of `engine` on which DeepSpeed's scaling of gradients depends: "bf16 with ZeRO 1"."""
    precision = "fp32"
    if engine.fp16_enabled():
        precision = "fp16"
    elif engine.bfloat16_enabled():
        precision = "bf16"
    pipeline = " under a pipeline" if isinstance(engine, StockPipelineEngine) else ""
    return f"{precision} with ZeRO {int(engine.zero_optimization_stage())}{pipeline}"


def check_factor(
    engine: Any, factor_of: Callable[[int], float], own_reduction: bool = False, pipeline: bool = False
) -> None:
    """Measure whether multiplying a loss by `factor_of(accumulation steps)` gives the intended gradient.

    Raises ValueError if DeepSpeed makes the gradient larger or smaller. Collective over all ranks. Each combination of
    settings is measured only once in a process.

    Without a pipeline, the intended gradient is the sum over the global batch. Under a pipeline, it is the mean over
    the replicas of each replica's sum over micro-batches.
    own_reduction: the caller reduces gradients over the replicas, so the measurement uses this rank alone.
    """
    if engine.has_wrapped_optimizer and engine.basic_optimizer is None:
        return  # an engine in half precision that only evaluates
    micros = min(engine.gradient_accumulation_steps(), 2)  # a wrong factor already shows with 2 micro-batches
    replicas = 1 if own_reduction else dist.get_world_size(engine.seq_data_parallel_group)
    settings = _probe_config(engine, micros, own_reduction)
    key = json.dumps([settings, replicas, own_reduction, pipeline], default=str, sort_keys=True)
    if key in _verified:
        return

    wanted = GRADIENT
    if pipeline and not engine.gradient_average:  # DeepSpeed then sums gradients over the replicas
        wanted *= replicas
    # The replicas' gradients differ, so that a rank also sees that they were not reduced. Their mean is GRADIENT.
    # For example, 4 replicas have 0.5, 0.5, 0.5 and 2.5 times this gradient.
    multiple = 0.5
    if own_reduction:
        multiple = 1.0
    elif dist.get_rank(engine.seq_data_parallel_group) == replicas - 1:
        multiple = (replicas + 1) / 2
    gradient = GRADIENT * multiple

    # Each of the micro-batches of a replica has the gradient `factor`, with which the engine multiplies its losses.
    factor = gradient * factor_of(micros) / (micros * replicas)
    measured = _measure_gradient(engine, settings, factor, own_reduction, pipeline)
    if not abs(measured / wanted - 1) < TOLERANCE:
        raise ValueError(
            f"DeepSpeed {deepspeed.__version__} makes gradients {measured / wanted:.4g} times as large as they should "
            f"be in {_describe_route(engine)} (measured on one weight with {micros} accumulation steps and {replicas} "
            "replicas): use another precision, ZeRO stage or release (docs/releases.md lists them), and leave "
            "settings that scale gradients out of the ds_config"
        )
    _verified.add(key)


def check_scale(engine: Any, untested: bool) -> None:
    """Raise ValueError if an engine without a pipeline scales gradients wrongly; a pipeline engine checks itself.

    DeepSpeed may divide by an fp16 loss scale that it never applied. Other engines are measured only if `untested`,
    that is, with a release that tds was not tested with.
    """
    # A DistributedOptimizer scales no gradients, and without `param_groups` there is no optimizer that steps.
    if isinstance(engine, StockPipelineEngine) or engine.distributed:
        return
    if not hasattr(engine.optimizer, "param_groups"):
        return
    if untested or isinstance(engine.optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        replicas = dist.get_world_size(engine.seq_data_parallel_group) if engine.gradient_average else 1
        # DeepSpeed divides by both numbers, so this factor makes the gradient a sum over the global batch.
        check_factor(engine, lambda micros: micros * replicas)

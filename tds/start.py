"""What is checked before the first step: settings that cannot be, and stages that do not fit together."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .boundary import Contract, agree, contract_of
from .schedule import Schedule, schedule_of
from .timetable import check


def checked_schedule(engine: Any, settings: Mapping[str, Any], chunks: int) -> Schedule:
    """The schedule that `settings`, "pipeline" of the ds_config, ask for. Raises ValueError for what cannot be."""
    _refuse_what_cannot_be(engine, settings, chunks)
    schedule = schedule_of(settings, chunks)
    check(
        [list(schedule(s, engine.num_stages, engine.micro_batches)) for s in range(engine.num_stages)],
        engine.micro_batches,
    )
    return schedule


def _refuse_what_cannot_be(engine: Any, settings: Mapping[str, Any], chunks: int) -> None:
    """Raise ValueError for settings that would give wrong numbers or that nobody would act on."""
    name = settings.get("schedule", "1f1b")
    if engine.fp16_enabled() and not engine.zero_optimization():
        raise ValueError(
            "fp16 under a pipeline needs ZeRO stage 1 (without it DeepSpeed takes a wrong gradient norm): "
            'set "zero_optimization": {"stage": 1}'
        )
    if name == "interleaved" and chunks == 1 and engine.num_stages > 1:
        raise ValueError("the schedule interleaved needs several chunks a stage: tds.PipelineModule(..., chunks=2)")
    if name == "zb-h1" and engine.module.activation_checkpoint_interval > 0:
        raise ValueError(
            "the schedule zb-h1 would recompute activations twice, once for each half of the backward pass: "
            "use 1f1b with activation checkpointing, or zb-h1 without"
        )
    config = engine._config
    if getattr(config, "curriculum_enabled_legacy", False):  # of DeepSpeed before 0.19
        raise ValueError(
            'nobody acts on "curriculum_learning" under this pipeline: shorten the samples in the data iterator, whose '
            "shapes may change from step to step, and leave it out of the ds_config"
        )
    if getattr(config, "torch_autocast_enabled", False) and config.torch_autocast_dtype == torch.float16:
        raise ValueError(
            "torch_autocast with float16 under a pipeline would scale the loss of each stage by itself: "
            'set "torch_autocast": {"dtype": "bfloat16"}, or "fp16": {"enabled": true} with ZeRO stage 1'
        )


def shake_hands(engine: Any, settings: Mapping[str, Any], chunks: int) -> Contract:
    """Tell all stages of this pipeline what this one puts out and takes in; raises alike on all where it does not fit."""
    told: dict[str, Any] = {key: settings.get(key) for key in ("schedule", "extra_warmup")}
    told |= {"gradient_accumulation_steps": engine.micro_batches, "chunks": chunks}
    told["dynamic_shape"] = engine.dynamic_shape
    contract = contract_of(engine.module, chunks, told)
    if engine.num_stages > 1:
        everyone: list[Any] = [None] * engine.num_stages
        dist.all_gather_object(everyone, contract, group=engine.grid.get_pipe_parallel_group())
        agree(everyone)
    return contract

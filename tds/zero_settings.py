"""Settings of ZeRO that DeepSpeed refuses without naming their keys or gets wrong, and those without support in tds."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ._deepspeed import DeepSpeedEngine, is_elementwise, on_cpu

QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def refuse_quantization_on_cpus(engine: Any) -> None:
    """Raise ValueError for quantized communication of ZeRO 3 on a CPU, for which DeepSpeed has no kernels."""
    if engine.zero_optimization_stage() != 3 or not on_cpu():
        return
    for key in QUANTIZED:
        if getattr(engine._config.zero_config, key, False):
            raise ValueError(
                f'"{key}" in the section "zero_optimization" of the ds_config needs a GPU, because DeepSpeed '
                "quantizes on GPUs only: leave it out on a CPU"
            )


def refuse_dtypes(engine: Any, optimizer: Any) -> None:
    """Raise ValueError for weights that DeepSpeed's optimizers, which flatten groups of weights, would convert.

    optimizer: the user's; None if the ds_config names one.
    """
    groups = [{"params": engine.module.parameters()}]
    if optimizer and engine.zero_optimization_stage() < 3:  # ZeRO 3 flattens the weights of all groups together
        groups = optimizer.param_groups
    for group in groups:
        trained = [p for p in group["params"] if p.requires_grad]
        for p in trained:
            if p.is_complex() or p.dtype is not trained[0].dtype:
                name = next(name for name, each in engine.module.named_parameters() if each is p)
                raise ValueError(
                    f"the weight {name} is {p.dtype}, but DeepSpeed's optimizers for ZeRO and half precision flatten "
                    "the weights of a parameter group into one tensor of one real dtype: wrap the optimizer in "
                    "tds.DistributedOptimizer, with ZeRO stage 1, or train in fp32 without ZeRO"
                )


@contextmanager
def naming_keys(engine: Any) -> Iterator[None]:
    """Raise ValueError, naming the key, for DeepSpeed's assertion about an odd bucket size in this block."""
    try:
        yield
    except AssertionError as error:
        size = engine._config.zero_config.allgather_bucket_size
        if size % 2 == 0 or "allgather_bucket_size" not in str(error):
            raise
        raise ValueError(
            f'"allgather_bucket_size": {size} in the section "zero_optimization" of the ds_config is odd, but '
            f"DeepSpeed needs a multiple of 2: write {size + 1}"
        ) from error


def refuse_unsupported(engine: Any, optimizer: Any) -> None:
    """Raise ValueError for settings that a DistributedOptimizer does not support."""
    problem = None
    if engine.fp16_enabled():
        problem = "has no loss scale for fp16: use bf16 or fp32"
    elif engine.zero_optimization_stage() != 1:
        problem = (
            f'needs ZeRO stage 1, not {int(engine.zero_optimization_stage())}: set "zero_optimization": {{"stage": 1}}'
        )
    elif not engine.gradient_average:
        problem = 'averages gradients over replicas: leave "gradient_allreduce_op" out of the ds_config'
    elif engine.zero_cpu_offload():
        problem = "keeps its states on the device: leave offload_optimizer out of the ds_config"
    elif engine.load_universal_checkpoint():
        problem = 'cannot load universal checkpoints: leave "load_universal" out of the ds_config'
    elif engine._config.torch_autocast_enabled and engine._config.torch_autocast_dtype == torch.float16:
        problem = "has no loss scale for torch_autocast in float16: use bfloat16"
    elif not (  # known to DeepSpeed, names the weights to step as wholes, or allowed by the user
        is_elementwise(optimizer.optimizer)
        or hasattr(optimizer.optimizer, "whole_work")
        or engine.zero_allow_untested_optimizer()
    ):
        problem = (
            f"needs an element-wise update, which {type(optimizer.optimizer).__name__} is not known to have: set "
            f'"zero_allow_untested_optimizer": true if it has one'
        )
    if problem:
        raise ValueError(
            f"tds.DistributedOptimizer {problem}, or do not wrap your optimizer in tds.DistributedOptimizer"
        )


def load_arguments(engine: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of `load_checkpoint` by name, changed so that `load_module_only` works in every stage.

    A tag becomes a string, as DeepSpeed makes it only in `save_checkpoint`. Raises FileNotFoundError if it names no
    folder.
    """
    arguments = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(engine, *args, **kwargs).arguments
    del arguments["self"]
    if arguments.get("tag") is not None:
        arguments["tag"] = str(arguments["tag"])
        if not Path(arguments["load_dir"], arguments["tag"]).is_dir():
            raise FileNotFoundError(f"{arguments['load_dir']} has no checkpoint {arguments['tag']}: pass another tag")
    if arguments.get("load_module_only") and engine.zero_optimization_stage() == 3:
        # Otherwise DeepSpeed would load no weights: the shards of ZeRO 3 are in the files of the optimizer states.
        arguments["load_optimizer_states"] = False
    return arguments

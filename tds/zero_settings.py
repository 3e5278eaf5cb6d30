"""Settings of ZeRO that DeepSpeed refuses without naming the key of the ds_config, or that it gets wrong."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._deepspeed import DeepSpeedEngine, on_cpu

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


def load_arguments(engine: Any, *args: Any, **more: Any) -> dict[str, Any]:
    """Return the arguments of `load_checkpoint` by name, changed so that `load_module_only` works in every stage."""
    given = inspect.signature(DeepSpeedEngine.load_checkpoint).bind(engine, *args, **more).arguments
    del given["self"]
    if given.get("load_module_only") and engine.zero_optimization_stage() == 3:
        # Otherwise DeepSpeed would load no weights: the shards of ZeRO 3 are in the files of the optimizer states.
        given["load_optimizer_states"] = False
    return given

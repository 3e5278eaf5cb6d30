"""Models as lists of layers, built from the sharded layers of `megatron.mpu`."""

from importlib import import_module
from typing import Any

from .gpt2 import gpt2_layers
from .layers import Layer, LayerStack, global_parameters

# Entry scripts import these models from `megatron.model`. The models in `megatron.compat` accept Megatron-LM's
# arguments. Pipeline models import DeepSpeed, which takes seconds, so each name below is imported on first use.
_HOMES = {
    "GPT2Model": "megatron.compat.models",
    "GPT2ModelPipe": "megatron.compat.pipes",
    "LayerStackPipe": "megatron.model.pipe",
    "T5Model": "megatron.compat.models",
    "T5ModelPipe": "megatron.compat.pipes",
    "t5_layers": "megatron.model.t5",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "GPT2Model", "GPT2ModelPipe", "Layer", "LayerStack", "LayerStackPipe", "T5Model", "T5ModelPipe",  # noqa: F822
    "global_parameters", "gpt2_layers", "t5_layers",
]  # fmt: skip

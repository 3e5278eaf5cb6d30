"""Models as lists of layers, built from the sharded layers of `megatron.mpu`."""

from importlib import import_module
from typing import Any

from .._compat import compat
from .gpt2_layers import gpt2_layers
from .layer_stack import LayerStack
from .layers import Layer, global_parameters

# Pipeline models import DeepSpeed, which takes seconds, so each name below is imported on first use.
_HOMES = {
    "LayerStackPipe": "megatron.model.pipe",
    "t5_layers": "megatron.model.t5",
}
# Models that accept Megatron-LM's arguments, for entry scripts, and their modules in `megatron_compat`.
_OF_SCRIPTS = {"GPT2Model": "models", "GPT2ModelPipe": "pipes", "T5Model": "models", "T5ModelPipe": "pipes"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _OF_SCRIPTS:
        return getattr(compat(_OF_SCRIPTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "GPT2Model", "GPT2ModelPipe", "Layer", "LayerStack", "LayerStackPipe", "T5Model", "T5ModelPipe",  # noqa: F822
    "global_parameters", "gpt2_layers", "t5_layers",
]  # fmt: skip

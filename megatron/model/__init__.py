"""A model is one list of layers, each readable as if there were one rank."""

from typing import Any

from .gpt2 import GPT2Model, gpt2_layers
from .layers import Layer, LayerStack, global_parameters
from .t5 import T5Model, t5_layers


def __getattr__(name: str) -> Any:
    # Pipeline models need DeepSpeed, whose import takes seconds: only who asks for them pays.
    if name in ("GPT2ModelPipe", "LayerStackPipe", "T5ModelPipe"):
        from . import pipe

        return getattr(pipe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "GPT2Model", "GPT2ModelPipe", "Layer", "LayerStack", "LayerStackPipe", "T5Model", "T5ModelPipe",  # noqa: F822
    "global_parameters", "gpt2_layers", "t5_layers",
]  # fmt: skip

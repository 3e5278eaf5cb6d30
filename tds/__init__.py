"""DeepSpeed with its pipeline engine replaced: `import tds as deepspeed`, and all else is still there.

schedule.py   when each stage computes and talks, as data
boundary.py   which tensors cross from one stage to the next
channel.py    how they travel
engine.py     the interpreter: schedule x boundary x channel = one training step
pipe.py       PipelineModule, LayerSpec, TiedLayerSpec
"""

import importlib
from typing import Any

from . import _deepspeed, pipe
from ._deepspeed import deepspeed as _ds
from .boundary import Boundary, BoundaryError
from .engine import PipelineEngine


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, which builds our PipelineEngine when the model is a PipelineModule.

    Takes what DeepSpeed's takes (`config_params` of old included) and returns
    `(engine, optimizer, training_dataloader, lr_scheduler)`.
    """
    _deepspeed.prepare()
    with _deepspeed.quietly(), _deepspeed.engine_class(PipelineEngine):
        return _ds.initialize(*args, **kwargs)


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """`deepspeed.init_distributed` with the backend of the device at hand (gloo on a CPU)."""
    _deepspeed.prepare()
    if dist_backend is None:
        on_cpu = _ds.accelerator.get_accelerator().device_name() == "cpu"
        dist_backend = "gloo" if on_cpu else _ds.accelerator.get_accelerator().communication_backend_name()
    _ds.init_distributed(dist_backend, *args, **kwargs)


def __getattr__(name: str) -> Any:
    """Every other name is DeepSpeed's own, submodules included."""
    if not hasattr(_ds, name) and not name.startswith("_"):
        try:
            return importlib.import_module(f"deepspeed.{name}")
        except ModuleNotFoundError:
            pass
    return getattr(_ds, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_ds)})


PipelineModule = pipe.PipelineModule

__all__ = ["Boundary", "BoundaryError", "PipelineEngine", "PipelineModule", "init_distributed", "initialize", "pipe"]

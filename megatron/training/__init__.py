"""Training of a model: `run(task)`, `pretrain` for entry scripts, and the functions that both call.

The names in `__all__` are imported lazily. So code that needs only `start_engine` does not import checkpointing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tasks.functions import pretrain
    from .build import start_engine
    from .entry import run
    from .feature import Feature
    from .loop import Run, evaluate, train
    from .setup import set_up
    from .task import Task

_HOMES = {
    "Feature": ".feature", "Run": ".loop", "Task": ".task", "evaluate": ".loop", "pretrain": "..tasks.functions",
    "run": ".entry", "set_up": ".setup", "start_engine": ".build", "train": ".loop",
}  # fmt: skip

__all__ = ["Feature", "Run", "Task", "evaluate", "pretrain", "run", "set_up", "start_engine", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)

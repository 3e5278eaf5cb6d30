"""A run: from the providers of an entry script to a trained checkpoint.

`pretrain` and its kin are imported when they are asked for: who wants only an engine needs no checkpoints.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .entry import Run, evaluate, pretrain, set_up, train

__all__ = ["Run", "evaluate", "pretrain", "set_up", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import entry

    return getattr(entry, name)

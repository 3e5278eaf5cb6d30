"""The optimizer of a run and its learning rate."""

from .lr import lr_at
from .optimizer import build_optimizer

__all__ = ["build_optimizer", "lr_at"]

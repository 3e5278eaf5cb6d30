"""Optimizer and learning-rate schedule of a run."""

from .lr import lr_at, settled
from .optimizer import build_optimizer

__all__ = ["build_optimizer", "lr_at", "settled"]

"""Optimizer and learning-rate schedule of a run."""

from .lr import lr_at, settled
from .optimizer import GroupKey, build_optimizer, group_keys

__all__ = ["GroupKey", "build_optimizer", "group_keys", "lr_at", "settled"]

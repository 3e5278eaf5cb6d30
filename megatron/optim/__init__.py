"""Optimizer and learning-rate schedule of a run."""

from .lr import lr_at
from .optimizer import GroupKey, build_optimizer, group_keys
from .resumed_lr import resolve_lr_schedule

__all__ = ["GroupKey", "build_optimizer", "group_keys", "lr_at", "resolve_lr_schedule"]

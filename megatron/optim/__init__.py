"""Optimizer and learning-rate schedule of a run."""

from .optimizer import GroupKey, build_optimizer, group_keys, lr_at
from .resumed_lr import resolve_lr_schedule

__all__ = ["GroupKey", "build_optimizer", "group_keys", "lr_at", "resolve_lr_schedule"]

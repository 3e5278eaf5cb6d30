"""Optimizer and learning-rate schedule of a run."""

from .optimizer import GroupKey, build_optimizer, group_keys, lr_at

__all__ = ["GroupKey", "build_optimizer", "group_keys", "lr_at"]

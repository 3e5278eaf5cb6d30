"""A run: from the providers of an entry script to a trained checkpoint."""

from .entry import Run, evaluate, pretrain, set_up, train

__all__ = ["Run", "evaluate", "pretrain", "set_up", "train"]

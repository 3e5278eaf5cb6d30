"""Base class of hooks, which the training loop calls before and after every iteration."""

from .engine import Step
from .health import SampleRange


class Hook:
    """Base class of hooks. The training loop calls both methods in every iteration; by default they do nothing."""

    def before_step(self, iteration: int) -> None:
        """Run the hook's action before iteration `iteration`, counted from 1."""

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        """Run the hook's action after an iteration.

        step: None if a --skip-* flag skipped the iteration.
        samples: the iteration's number and its range of samples.
        """


def due(iteration: int, interval: int) -> bool:
    """Return True if an action that recurs every `interval` iterations is due; False for interval 0."""
    return interval > 0 and iteration % interval == 0

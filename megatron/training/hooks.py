"""The protocol between the training loop and its hooks, which act around every iteration."""

from .engine import Step
from .health import SampleRange


class Hook:
    """Base class of hooks: methods that are called around every iteration and do nothing by default."""

    def before_step(self, iteration: int) -> None:
        """Act before iteration `iteration`, counted from 1."""

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        """Act after an iteration.

        step: None if a --skip-* flag skipped the iteration.
        samples: the iteration's number and its range of samples.
        """


def due(iteration: int, interval: int) -> bool:
    """Return whether an event that recurs every `interval` iterations is due; an interval of 0 means never."""
    return interval > 0 and iteration % interval == 0

"""Python's garbage is collected at the same iterations on all ranks: where it comes by itself, now on one and now on another, all wait each time."""

import gc
from types import TracebackType


class Garbage:
    """Use as a context manager around the loop, which leaves none itself; what a user's code leaves goes at every `interval`-th iteration.

    What is there at the start, the libraries above all, is not looked through any more. interval: 0 leaves all to Python.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._was_on = interval, gc.isenabled()
        self._thaw = not gc.get_freeze_count()  # what somebody else has frozen stays so: it cannot be told from ours

    def __enter__(self) -> "Garbage":
        if self._interval:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interval:
            if self._thaw:
                gc.unfreeze()
            if self._was_on:
                gc.enable()

    def after(self, iteration: int) -> None:
        """At the end of each iteration."""
        if self._interval and iteration % self._interval == 0:
            gc.collect()

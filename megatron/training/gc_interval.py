"""Garbage collection by Python at the same iterations on all ranks.

Python's automatic garbage collection runs at different times on different ranks. While one rank collects garbage, the
other ranks wait for it.
"""

import gc
from types import TracebackType

from .engine import Step
from .health import SampleRange
from .hooks import Hook, due


class Garbage(Hook):
    """Hook and context manager that collects Python's garbage only every `interval` iterations.

    The training loop creates no cyclic garbage, but user code may. Objects that exist at the start, mostly of
    libraries, are frozen, so that no collection scans these objects again.
    interval: number of iterations; 0 keeps Python's automatic garbage collection.
    """

    def __init__(self, interval: int) -> None:
        self._interval, self._was_on = interval, gc.isenabled()
        # gc.unfreeze() unfreezes all objects, so it is not called if other code has frozen objects.
        self._thaw = not gc.get_freeze_count()

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

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        if due(samples.iteration, self._interval):
            gc.collect()

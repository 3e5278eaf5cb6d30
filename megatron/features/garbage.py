"""Garbage collection by Python at the same iterations on all ranks.

Python's automatic garbage collection runs at different times on different ranks. While one rank collects garbage, the
other ranks wait for it.
"""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.feature_settings import FeatureSettings
from ..config.fields import at_least, opt
from ..frozen import frozen_objects
from ..training.feature import Feature, due

if TYPE_CHECKING:
    from ..engines.engine import StepResult
    from ..training.health import SampleRange
    from ..training.run_state import Run


@dataclass(frozen=True, kw_only=True)
class GarbageSettings(FeatureSettings):
    """The flag --manual-gc-interval."""

    manual_gc_interval: int = opt(
        100,
        "number of iterations between garbage collections, which all ranks run at the same time; 0 leaves garbage "
        "collection to Python",
        at_least(0),
    )


class Garbage(Feature):
    """Feature that collects Python's garbage only every --manual-gc-interval iterations.

    The training loop creates no cyclic garbage, but user code may. Objects that exist at the start, mostly of
    libraries, are frozen, so that no collection scans these objects again.
    """

    Settings = GarbageSettings

    def start(self, run: "Run") -> None:
        self._interval = run.config.of(GarbageSettings).manual_gc_interval
        self._was_on = gc.isenabled()
        gc.collect()
        frozen_objects.freeze()
        gc.disable()

    def close(self, error: BaseException | None) -> None:
        frozen_objects.unfreeze()
        if self._was_on:
            gc.enable()

    def after_step(self, step: "StepResult | None", samples: "SampleRange") -> None:
        if due(samples.iteration, self._interval):
            gc.collect()

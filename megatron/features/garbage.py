"""Garbage collection by Python at the same iterations on all ranks.

Python's automatic garbage collection runs at different times on different ranks. While one rank collects garbage, the
other ranks wait for it.
"""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.feature_settings import FeatureSettings
from ..config.fields import at_least, opt
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
        # gc.unfreeze() unfreezes all objects, so it is not called if other code has frozen objects.
        self._may_unfreeze = not gc.get_freeze_count()
        gc.collect()
        gc.freeze()
        gc.disable()

    def close(self, error: BaseException | None) -> None:
        if self._may_unfreeze:
            gc.unfreeze()
        if self._was_on:
            gc.enable()

    def after_step(self, step: "StepResult | None", samples: "SampleRange") -> None:
        if due(samples.iteration, self._interval):
            gc.collect()

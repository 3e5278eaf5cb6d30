"""The flag --skip-step-sigma: skip steps whose loss or gradient norm is far above those of recent steps."""

import math
from typing import Any

from tds.spikes import SpikeGuard

from ..json_text import brief
from ..ranks.rank_0 import print_rank_0
from ..training.engine import Step
from ..training.feature import Feature, Interval, Plan
from ..training.health import SampleRange


class Guard(Feature):
    """Feature that lets a SpikeGuard decide about each step. A checkpoint stores the steps that it compares with."""

    def engine(self, engine: Any, plan: Plan) -> None:
        t = plan.config.train
        assert t.skip_step_sigma is not None
        self._guard = SpikeGuard(engine, t.skip_step_sigma, t.skip_step_window)
        self._skipped: list[dict[str, Any]] = []

    def after_step(self, step: Step | None, samples: SampleRange) -> None:
        if step is None or step.spike is None:
            return
        print_rank_0(f"{samples} is skipped, as --skip-step-sigma asks: {step.spike}")
        self._skipped.append({**samples._asdict(), **step.spike._asdict()})

    def row(self, interval: Interval) -> dict[str, Any]:
        skipped = self._skipped
        self._skipped = []
        return {"skipped_spikes": skipped} if skipped else {}

    def state(self) -> dict[str, Any]:
        recent = [list(pair) for pair in self._guard.recent]
        return {"recent": recent} if recent else {}

    def load(self, state: dict[str, Any]) -> None:
        recent = state.get("recent")
        if not isinstance(recent, list) or not all(map(_is_step, recent)):
            found = brief(repr(recent))
            raise ValueError(f"state.features.spike_guard.recent must be a list of pairs of numbers, not {found}")
        self._guard.recent.extend((loss, norm) for loss, norm in recent)


def _is_step(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is float and math.isfinite(x) for x in value)

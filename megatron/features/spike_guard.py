"""The flag --skip-step-sigma: skip steps whose loss or gradient norm is far above those of recent steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.feature_settings import FeatureSettings
from ..config.fields import at_least, more_than, opt
from ..json_text import are_number_pairs, brief
from ..training.feature import Feature, Interval, Plan

if TYPE_CHECKING:
    from ..engines.engine import StepResult
    from ..training.health import SampleRange
    from ..training.run_state import Run


@dataclass(frozen=True, kw_only=True)
class GuardSettings(FeatureSettings):
    """The flags --skip-step-sigma and --skip-step-window."""

    skip_step_sigma: float | None = opt(
        None,
        "skip a step if its loss or gradient norm is more than this many standard deviations above the mean of the "
        "last --skip-step-window steps that were not skipped; 6 is usual; if not given, no step is skipped for this",
        more_than(0),
    )
    skip_step_window: int = opt(
        128,
        "with --skip-step-sigma: number of recent steps of the mean; no step is skipped until there are half as many",
        at_least(4),
    )

    def problems(self) -> Iterator[str]:
        if self.skip_step_sigma is None and self.skip_step_window != 128:
            yield "--skip-step-window needs --skip-step-sigma"


class Guard(Feature):
    """Feature that lets a SpikeGuard decide about each step. A checkpoint stores the steps that it compares with.

    Losses and gradient norms of other data or of larger batches are no measure of a step, so the guard forgets them.
    """

    Settings = GuardSettings
    _batch_tokens = 0  # tokens of the batches of the recent steps; 0 if unknown

    def engine(self, engine: Any, plan: Plan) -> None:
        from tds.spikes import SpikeGuard

        settings = plan.config.of(GuardSettings)
        assert settings.skip_step_sigma is not None
        self._guard = SpikeGuard(engine, settings.skip_step_sigma, settings.skip_step_window)
        self._skipped: list[dict[str, Any]] = []

    def start(self, run: "Run") -> None:
        self._run = run

    def before_step(self, iteration: int) -> None:
        from ..training.remote_datasets import begins_stage

        run = self._run
        first = run.state.consumed_samples
        samples = range(first, first + run.global_batch_size)  # those of the coming step
        tokens = len(samples) * sum(run.sample_shape)
        # The gradient of a smaller batch has more noise, so its norm is higher in every step.
        if begins_stage(run.datasets[0], samples) or tokens < self._batch_tokens:
            self._guard.recent.clear()
        self._batch_tokens = tokens

    def after_step(self, step: "StepResult | None", samples: "SampleRange") -> None:
        from ..ranks.rank_0 import print_rank_0

        if step is None or step.spike is None:
            return
        print_rank_0(f"{samples} is skipped, as --skip-step-sigma asks: {step.spike}")
        # The row names the samples of the step and what was far above the mean.
        self._skipped.append({**samples._asdict(), **step.spike._asdict()})

    def row(self, interval: Interval) -> dict[str, Any]:
        skipped = self._skipped
        self._skipped = []
        return {"skipped_spikes": skipped} if skipped else {}

    def state(self) -> dict[str, Any]:
        recent = [list(pair) for pair in self._guard.recent]
        return {"recent": recent, "batch_tokens": self._batch_tokens} if recent else {}

    def load(self, state: dict[str, Any]) -> None:
        recent: Any = state.get("recent")
        if not are_number_pairs(recent):
            found = brief(repr(recent))
            raise ValueError(f"state.features.spike_guard.recent must be a list of pairs of numbers, not {found}")
        batch_tokens = state.get("batch_tokens", 0)  # version 0.2.0 and older did not store it
        if type(batch_tokens) is not int:
            found = brief(repr(batch_tokens))
            raise ValueError(f"state.features.spike_guard.batch_tokens must be a whole number, not {found}")
        self._guard.recent.extend(map(tuple, recent))
        self._batch_tokens = batch_tokens

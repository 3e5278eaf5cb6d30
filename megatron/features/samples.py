"""The flag --sample-prompt: texts of the model at each evaluation, continued from the same prompts.

Rank 0 encodes the prompts, and draws each next token. All ranks compute its logits, in the layout of the run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.feature_settings import FeatureSettings
from ..config.fields import at_least, opt
from ..training.feature import Periodic, Plan

if TYPE_CHECKING:
    from ..training.run_state import Run


DECODER_ONLY = ("gpt2", "llama")  # families whose models can continue a prompt


@dataclass(frozen=True, kw_only=True)
class SampleSettings(FeatureSettings):
    """The flags --sample-prompt, --sample-interval, --sample-tokens and --sample-temperature."""

    sample_prompt: tuple[str, ...] | None = opt(
        None,
        "texts that the model continues at each evaluation, at the beginning of a document; the continuations are in "
        "the log, in metrics.jsonl and in the report, and change no number",
        family=DECODER_ONLY,
    )
    sample_interval: int | None = opt(
        None,
        "with --sample-prompt: number of iterations between samples; 0 samples only at the end; if not given, "
        "--eval-interval",
        at_least(0),
        family=DECODER_ONLY,
    )
    sample_tokens: int = opt(60, "with --sample-prompt: maximum number of new tokens", at_least(1), family=DECODER_ONLY)
    sample_temperature: float = opt(
        0.8, "with --sample-prompt: temperature of the samples; 0 is greedy", at_least(0), family=DECODER_ONLY
    )

    def problems(self) -> Iterator[str]:
        if self.sample_prompt:
            # Python reads bytes of an argument that are not UTF-8 as halves of surrogate pairs.
            if re.search("[\ud800-\udfff]", "".join(self.sample_prompt)):
                yield "--sample-prompt is not valid UTF-8; set the terminal's encoding to UTF-8"
            return
        for name in ("sample_interval", "sample_tokens", "sample_temperature"):
            # The attribute of the class is the default of the setting.
            if getattr(self, name) != getattr(SampleSettings, name):
                yield f"--{name.replace('_', '-')} needs --sample-prompt"

    def conflicts(self, config: Any) -> Iterator[str]:
        if self.sample_prompt and config.objective != "lm":
            yield f"--sample-prompt continues plain text, so it cannot be combined with --objective {config.objective}"


class Samples(Periodic):
    """Feature that writes a row with the split `samples` and the texts of all prompts."""

    Settings = SampleSettings

    def engine(self, engine: Any, plan: Plan) -> None:
        """Check that the model can continue texts."""
        from ..ranks.agreement import raise_on_all_ranks
        from .eval_tasks import check_scorable

        with raise_on_all_ranks():
            check_scorable(engine.module, "--sample-prompt")

    def start(self, run: "Run") -> None:
        """Read the prompts and the interval, by default that of evaluations."""
        settings = run.config.of(SampleSettings)
        self._run = run
        assert settings.sample_prompt  # else the run does not have this feature
        self._prompts = settings.sample_prompt
        interval = settings.sample_interval
        self._interval = run.config.train.eval_interval if interval is None else interval

    def end(self) -> None:
        """Continue, after the last iteration, the prompts whose texts metrics.jsonl does not hold yet."""
        from ..ranks.objects import broadcast_from_rank_0

        run = self._run
        missing = [each for each in self._prompts if not run.metrics.has_row(f"samples/{each}", run.state.iteration)]
        self._prompts = broadcast_from_rank_0(tuple(missing))  # only rank 0 reads metrics.jsonl
        if self._prompts:
            self._write()

    def _write(self) -> None:
        """Continue the prompts, and print and log the texts."""
        from ..ranks.rank_0 import print_rank_0
        from .continuations import continue_prompts

        run = self._run
        settings = run.config.of(SampleSettings)
        texts = continue_prompts(run, self._prompts, settings.sample_tokens, settings.sample_temperature)
        if not texts:  # the model has NaN logits
            return
        samples = []
        for prompt, text in zip(self._prompts, texts, strict=True):
            print_rank_0(f"iteration {run.state.iteration:7d} | sample of {prompt}: {text}")
            samples.append({"prompt": prompt, "text": text})
        run.metrics.write({"split": "samples", "iteration": run.state.iteration, "samples": samples})

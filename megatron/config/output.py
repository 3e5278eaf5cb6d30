"""Settings of checkpoints and logs; the other sections are in `sections.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import Section, at_least, opt, range_problem


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Settings of saving and loading checkpoints."""

    save: str | None = opt(None, "folder of the checkpoints; checkpoints/ in the run directory if not given")
    load: str | None = opt(None, "run directory or checkpoint folder to start from while --save holds no checkpoint")
    finetune: bool = opt(False, "take only the weights of --load: optimizer, data and iterations start from scratch")
    load_optim: bool = opt(True, "load the optimizer's moments and the loss scale")
    load_rng: bool = opt(True, "continue the checkpoint's random streams for dropout, instead of new ones from --seed")
    override_data: bool = opt(False, "continue although data, --split, --seed or lengths of the samples have changed")
    override_tokenizer: bool = opt(False, "continue with another tokenizer of the same vocabulary size")
    async_save: bool = opt(
        False, "write checkpoints while training continues; needs memory for a copy of what a rank saves"
    )
    save_interval: int = opt(1000, "iterations between two checkpoints; 0 saves only at the end", at_least(0))
    save_at_end: bool = opt(True, "save after the last iteration")
    max_failed_saves: int = opt(
        3, "how many saves in a row may fail, e.g. on a full disk, before the run ends; 0 for none", at_least(0)
    )
    keep_last: int | None = opt(None, "number of newest checkpoints to keep; all if not given", at_least(1))
    keep_every: int | None = opt(
        None, "with --keep-last: also keep checkpoints whose iteration is a multiple of this", at_least(1)
    )
    exit_duration_in_mins: float | None = opt(None, "save and end after this many minutes", at_least(0))
    exit_interval: int | None = opt(
        None, "save and end after the next iteration whose number is a multiple of this", at_least(1)
    )

    def _problems(self) -> Iterator[str]:
        if self.keep_every and self.keep_last is None:
            yield "--keep-every needs --keep-last: without it all checkpoints are kept"
        if self.finetune and not self.load:
            yield "--finetune needs --load, which names the checkpoint to take the weights from"


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Settings of the run directory, logs, metrics and traces."""

    run_dir: str | None = opt(None, "folder of this run; runs/<model>-<time> if not given")
    override_lock: bool = opt(
        False,
        "take over run.lock of a run on another machine or in another container; use it only if that run has ended",
    )
    log_interval: int | None = opt(
        None,
        "iterations between two log lines; if not given, steps_per_print of --deepspeed-config, or 10",
        at_least(1),
    )
    log_details: bool = opt(
        False, "add tokens, time, TFLOP/s and memory to each log line, and list the parts of the memory estimate"
    )
    tensorboard: bool | None = opt(None, "write TensorBoard events; if not given, on if tensorboard is installed")
    tensorboard_dir: str | None = opt(
        None, "folder of the TensorBoard events; tensorboard/ in the run directory if not given"
    )
    wandb: bool = opt(
        False, "write to Weights & Biases (wandb reads WANDB_MODE, WANDB_PROJECT and its other variables)"
    )
    mlflow: bool = opt(
        False, "write to MLflow: to mlflow/ in the run directory, or to MLFLOW_TRACKING_URI if that is set"
    )
    csv: bool = opt(False, "write metrics.csv in the run directory, too")
    trace: bool = opt(
        False,
        "record a timeline of passes, messages and collectives on every rank, for the newest 50 iterations or "
        "--trace-iterations: a Chrome trace (for Perfetto) in the folder trace of the run directory; "
        "tools/draw_schedule.py --run draws it",
    )
    trace_iterations: str | None = opt(
        None,
        "with --trace: the iterations to record, e.g. 41-50",
        range_problem,
    )
    profile: bool = opt(
        False,
        "profile a few iterations with torch's profiler: every operator and kernel of all ranks, and the timeline "
        "of --trace, in profile/merged.json.gz of the run directory (Chrome trace, for Perfetto). It slows these "
        "iterations, while --trace costs next to nothing and can stay on",
    )
    profile_iterations: str | None = opt(
        None,
        "with --profile: the iterations to profile, e.g. 41-43; if not given, the sixth to eighth after the start",
        range_problem,
    )

    def _problems(self) -> Iterator[str]:
        if self.tensorboard_dir and self.tensorboard is False:
            yield "--tensorboard-dir names a folder of events, but --no-tensorboard writes none; leave one out"
        if self.trace_iterations and not self.trace:
            yield "--trace-iterations needs --trace"
        if self.profile_iterations and not self.profile:
            yield "--profile-iterations needs --profile"
        if self.profile and self.trace:
            yield "--profile already records the timeline of --trace; leave one of them out"

    @property
    def traced(self) -> tuple[int, int] | None:
        """First and last iteration of --trace-iterations, or None."""
        return _ends(self.trace_iterations)

    @property
    def profiled(self) -> tuple[int, int] | None:
        """First and last iteration of --profile-iterations, or None."""
        return _ends(self.profile_iterations)


def _ends(words: str | None) -> tuple[int, int] | None:
    if words is None:
        return None
    first, _, last = words.partition("-")
    return int(first), int(last or first)

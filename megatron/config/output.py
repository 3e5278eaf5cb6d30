"""Settings of checkpoints and logs; the other sections are in `sections.py`."""

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import Section, at_least, opt, problems_where
from .train import range_problem


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Settings of saving and loading checkpoints."""

    save: str | None = opt(
        None,
        "folder of the checkpoints, or a URL of object storage such as s3://bucket/run, which needs --run-dir; "
        "checkpoints/ in the run directory if not given",
    )
    load: str | None = opt(
        None,
        "run directory or checkpoint folder to start from, or the URL of one; ignored once the folder --save contains "
        "a checkpoint",
    )
    exit_on_missing_checkpoint: bool = opt(
        False, "end the run if --load holds no checkpoint, also if it names the folder of this run itself"
    )
    finetune: bool = opt(
        False, "load only the weights of --load; optimizer state, data and iterations start from scratch"
    )
    load_optim: bool = opt(True, "load the optimizer's moments, the loss scale and the average of --ema-decay")
    load_rng: bool = opt(True, "draw dropout from the seed in the checkpoint, not from --seed")
    override_data: bool = opt(False, "continue although the data, --split, --seed or the sample length has changed")
    override_tokenizer: bool = opt(False, "continue with another tokenizer that has the same vocabulary size")
    async_save: bool = opt(
        False,
        "write checkpoints in the background while training continues; each rank needs host memory for a copy of the "
        "tensors that it saves",
    )
    save_interval: int = opt(1000, "iterations between two checkpoints; 0 saves only at the end", at_least(0))
    save_at_end: bool = opt(True, "save a checkpoint after the last iteration")
    max_failed_saves: int = opt(
        3,
        "number of consecutive failed saves (e.g. on a full disk) to tolerate; 0 ends the run at the first failed save",
        at_least(0),
    )
    keep_last: int | None = opt(None, "number of newest checkpoints to keep; all if not given", at_least(1))
    keep_every: int | None = opt(
        None, "with --keep-last: also keep checkpoints whose iteration is a multiple of this number", at_least(1)
    )
    exit_duration_in_mins: float | None = opt(
        None, "save a checkpoint and end the run after this many minutes", at_least(0)
    )
    exit_interval: int | None = opt(
        None,
        "save a checkpoint and end the run after the next iteration that is a multiple of this number",
        at_least(1),
    )

    def _problems(self) -> Iterator[str]:
        yield from problems_where(
            (
                self.keep_every and self.keep_last is None,
                "--keep-every needs --keep-last: without it all checkpoints are kept",
            ),
            (
                self.finetune and not self.load,
                "--finetune needs --load, which names the checkpoint to take the weights from",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """Settings of the run directory, logs, metrics and traces."""

    run_dir: str | None = opt(None, "folder of this run; runs/<model>-<time> if not given")
    override_lock: bool = opt(
        False,
        "take over a run.lock that a run on another machine has left, or one on a file system without locks; use this "
        "flag only if that run has ended; a lock that is held is never taken over",
    )
    log_interval: int | None = opt(
        None,
        "number of iterations between log lines; if not given, steps_per_print of --deepspeed-config, or 10",
        at_least(1),
    )
    log_details: bool = opt(
        False, "add tokens, time, TFLOP/s and memory to each log line, and print the parts of the memory estimate"
    )
    log_layers: bool = opt(
        False,
        "add to each log line's row in metrics.jsonl, for each layer: the norms of weights and gradients, the ratio of "
        "the update to the weights, the RMS of the activations and the largest attention logit of that iteration",
    )
    tensorboard: bool | None = opt(None, "write TensorBoard events; if not given, on if tensorboard is installed")
    tensorboard_dir: str | None = opt(
        None, "folder of the TensorBoard events; tensorboard/ in the run directory if not given"
    )
    wandb: bool = opt(
        False, "log to Weights & Biases; configure it with WANDB_PROJECT, WANDB_MODE and wandb's other variables"
    )
    swanlab: bool = opt(
        False,
        "log to SwanLab; configure it with SWANLAB_MODE (cloud, local, offline or disabled), SWANLAB_PROJ_NAME and "
        "swanlab's other variables",
    )
    mlflow: bool = opt(
        False, "log to MLflow: to MLFLOW_TRACKING_URI if the variable is set, else to mlflow/ in the run directory"
    )
    trace: bool = opt(
        False,
        "record a timeline of the passes, messages and collectives of every rank, for the newest 50 iterations or for "
        "--trace-iterations. The timeline is a Chrome trace (for Perfetto) in trace/ of the run directory; "
        "tools/draw_schedule.py --run draws it",
    )
    trace_iterations: str | None = opt(
        None,
        "with --trace: the iterations to record, e.g. 41-50",
        range_problem,
    )
    profile: bool = opt(
        False,
        "profile a few iterations with torch's profiler: profile/torch_RANK.json.gz in the run directory (Chrome "
        "trace, for Perfetto) has every operator and kernel of a rank. Profiling slows these iterations; --trace, "
        "which has all ranks on one clock, costs next to nothing and can stay on",
    )
    profile_iterations: str | None = opt(
        None,
        "with --profile: the iterations to profile, e.g. 41-43; if not given, the sixth to eighth iteration after the "
        "start",
        range_problem,
    )

    def _problems(self) -> Iterator[str]:
        yield from problems_where(
            (
                self.tensorboard_dir and self.tensorboard is False,
                "--tensorboard-dir is given, but --no-tensorboard writes no events; leave one of them out",
            ),
            (self.trace_iterations and not self.trace, "--trace-iterations needs --trace"),
            (self.profile_iterations and not self.profile, "--profile-iterations needs --profile"),
        )

    @property
    def trace_range(self) -> tuple[int, int] | None:
        """First and last iteration of --trace-iterations, or None."""
        return None if self.trace_iterations is None else parse_range(self.trace_iterations)

    @property
    def profile_range(self) -> tuple[int, int] | None:
        """First and last iteration of --profile-iterations, or None."""
        return None if self.profile_iterations is None else parse_range(self.profile_iterations)


def parse_range(text: str) -> tuple[int, int]:
    """Parse `10-12` into (10, 12), and `7` alone into (7, 7)."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)

"""Settings of the parallel layout; the other sections are in `sections.py`."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .fields import ConfigError, OneOf, Section, at_least, between, opt, problems_where

if TYPE_CHECKING:
    from .sections import Config


_accepts_any_schedule = ContextVar("whether the name of any schedule is valid", default=False)


@contextmanager
def accept_any_schedule() -> Iterator[None]:
    """Accept the settings of a run whose script registers its schedule, where this script does not run."""
    token = _accepts_any_schedule.set(True)
    try:
        yield
    finally:
        _accepts_any_schedule.reset(token)


class _ScheduleName(OneOf):
    """Check that a value is a built-in schedule or one that the script has registered in `tds.schedule`."""

    def __call__(self, value: Any) -> str | None:
        if value in self.choices or _accepts_any_schedule.get():
            return None
        from .schedules import is_registered

        if is_registered(value):
            return None
        return f"{super().__call__(value)}, or a name registered by tds.schedule.register() before the run"


SCHEDULES = _ScheduleName(("1f1b", "gpipe", "interleaved", "zb-h1"))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Settings of the parallel layout: how model and data are divided over the ranks."""

    model_parallel_size: int = opt(1, "number of ranks that split every layer (tensor parallelism)", at_least(1))
    sequence_parallel: bool | None = opt(
        None,
        "sequence parallelism: also shard hidden states along the sequence over the model-parallel ranks, which saves "
        "memory without sending more bytes; if not given, on for GPT-2, Llama and T5 on accelerators if "
        "--model-parallel-size divides the sequence length",
    )
    async_tensor_model_parallel_allreduce: bool = opt(
        True, "all-reduce the gradient of a layer's input while the gradient of its weight is computed"
    )
    context_parallel_size: int = opt(
        1,
        "number of ranks that shard the tokens of each sample, for long samples (context parallelism); attention "
        "all-gathers keys and values",
        at_least(1),
        family=("gpt2", "llama"),
    )
    expert_parallel_size: int = opt(
        1,
        "number of consecutive data-parallel ranks that divide the experts of a layer among themselves (expert "
        "parallelism); they send each other the tokens of their experts",
        at_least(1),
    )
    pipe_parallel_size: int = opt(
        0, "number of pipeline stages; 0 for no pipeline, 1 for a pipeline of one stage", at_least(0)
    )
    partition_method: str = opt(
        "balanced",
        "how layers are divided into stages: balanced (by FLOPs, embedding and logits included), measured (by times "
        "measured at startup), type:REGEX, uniform, parameters, or a list of each stage's first layer, e.g. 0,4,8",
    )
    pipeline_schedule: str = opt(
        "1f1b",
        "order of forward and backward passes: 1f1b, gpipe, interleaved or zb-h1 (tools/draw_schedule.py draws them), "
        "or a name that the script has registered by tds.schedule.register()",
        SCHEDULES,
    )
    virtual_pipeline_size: int = opt(
        1,
        "with --pipeline-schedule interleaved: number of groups of layers (virtual stages) on each pipeline stage",
        at_least(1),
    )
    pipeline_extra_warmup: int = opt(
        0,
        "with --pipeline-schedule 1f1b: with a value of n, each stage runs 1 + n times as many warm-up forward passes, "
        "but not more than the micro-batches of a step. This hides message latency, but costs memory, which "
        "tools/draw_schedule.py shows",
        at_least(0),
    )
    pipeline_timeout: float = opt(
        600.0,
        "with a pipeline: seconds that one pass or message may take before all ranks end with a report",
        at_least(0.1),
    )
    zero_stage: int | None = opt(
        None,
        "ZeRO stage; if not given, the stage in --deepspeed-config, else 0 in fp32 and 1 in mixed precision",
        between(0, 3),
    )
    overlap_grad_reduce: bool = opt(
        True,
        "reduce gradients over replicas during the last backward pass of a step instead of after it; works without "
        "ZeRO, and with ZeRO 1 in fp32 and bf16. With --no-overlap-grad-reduce, ZeRO 1 uses DeepSpeed's optimizer",
    )
    overlap_param_gather: bool = opt(
        False,
        "with ZeRO 1 in fp32 or bf16: wait for the gathered weights in the next forward pass, layer by layer, instead "
        "of at the end of a step",
    )
    checkpoint_activations: bool = opt(False, "store only layer inputs and recompute activations in the backward pass")
    checkpoint_num_layers: int = opt(
        1, "with --checkpoint-activations: number of layers that are recomputed from one stored input", at_least(1)
    )
    startup_timeout_minutes: float = opt(
        30.0,
        "timeout in minutes for ranks that wait for each other before the first step, e.g. while a model loads",
        at_least(0.01),
    )
    distributed_timeout_minutes: float = opt(
        10.0,
        "timeout in minutes, from the first step on: the run ends with a report if a collective takes longer, or, in a "
        "run without a pipeline, if a micro-batch takes longer",
        at_least(0.01),
    )

    def _problems(self) -> Iterator[str]:
        schedule = self.pipeline_schedule
        chunks = self.virtual_pipeline_size
        yield from problems_where(
            (
                self.pipeline_extra_warmup and schedule != "1f1b",
                f"--pipeline-extra-warmup is for 1f1b, not for --pipeline-schedule {schedule}",
            ),
            # Two mistakes: several chunks without interleaved, and interleaved with one chunk.
            (
                (chunks > 1) != (schedule == "interleaved"),
                f"--virtual-pipeline-size {chunks} does not fit --pipeline-schedule {schedule}: interleaved needs 2 or "
                "more, the others 1",
            ),
        )

    def splits_backward(self, micros: int) -> bool:
        """Return whether the schedule computes the gradients of weights in separate passes.

        micros: number of micro-batches of a step.
        """
        if self.pipeline_schedule in SCHEDULES.choices:  # a built-in schedule
            return self.pipeline_schedule == "zb-h1"
        # A schedule that the script has registered by tds.schedule.register(). Only this case needs to import tds.
        from . import schedules

        return schedules.splits_backward(self.pipeline_schedule, self.stages, micros)

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return max(self.pipe_parallel_size, 1)

    @property
    def chunks(self) -> int:
        """Number of groups of layers on each stage; a single stage has nothing to interleave."""
        return self.virtual_pipeline_size if self.stages > 1 else 1

    @property
    def fewest_ranks(self) -> int:
        """Number of ranks of one replica of the model, the smallest number with which a run can start."""
        # The replicas times the context-parallel ranks must be a multiple of both sizes.
        data_ranks = math.lcm(self.context_parallel_size, self.expert_parallel_size)
        return self.stages * self.model_parallel_size * data_ranks

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel replicas.

        Raises ConfigError if `world_size` is not divisible by the number of ranks of a replica.
        """
        replica_ranks = self.stages * self.model_parallel_size * self.context_parallel_size
        if world_size % replica_ranks:
            context_ranks = self.context_parallel_size
            context_flag = f" x --context-parallel-size {context_ranks}" if context_ranks > 1 else ""
            raise ConfigError(
                f"{world_size} ranks cannot be divided into replicas of --pipe-parallel-size "
                f"{self.pipe_parallel_size} x --model-parallel-size {self.model_parallel_size}{context_flag}; "
                f"start a multiple of {replica_ranks} ranks"
            )
        # Context-parallel ranks hold copies of the weights, so experts are divided among them, too.
        replicas = world_size // replica_ranks
        data_ranks = replicas * self.context_parallel_size
        if data_ranks % self.expert_parallel_size:
            raise ConfigError(
                f"{data_ranks} data-parallel ranks cannot be divided into groups of --expert-parallel-size "
                f"{self.expert_parallel_size}; choose a divisor"
            )
        return replicas


def uses_sequence_parallel(config: "Config", on_accelerator: bool) -> bool:
    """Return whether the run uses sequence parallelism.

    on_accelerator: whether the device is an accelerator. On a CPU, sequence parallelism is slower and therefore off
    by default.
    """
    p = config.parallel
    d = config.data
    if p.sequence_parallel is not None:
        return p.sequence_parallel  # given by the user
    # A custom model (no family) uses it only if it is given.
    if not on_accelerator or p.model_parallel_size == 1 or config.model.family is None:
        return False
    tokens = d.seq_length // p.context_parallel_size
    lengths = (tokens, d.enc_seq_length or 0, d.dec_seq_length or 0)  # any size divides the 0 of a length not given
    return all(length % p.model_parallel_size == 0 for length in lengths)

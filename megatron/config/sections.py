"""All settings of a run as frozen dataclasses.

Flags and the JSON reader in `command_line.py` are generated from the fields. Derived values are properties.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from . import objectives
from .data import DataConfig
from .fields import ConfigError, Section, at_least, between, flag, is_range, one_of, opt
from .model import ModelConfig, heads_problem
from .optim import OptimConfig, share_of
from .output import CheckpointConfig, LogConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Settings of the layout over ranks."""

    model_parallel_size: int = opt(1, "ranks that share every layer (tensor parallel)", at_least(1))
    sequence_parallel: bool | None = opt(
        None,
        "split hidden states along the sequence over these ranks, too: less memory, as many bytes sent; if not given, on "
        "accelerators, with a model of ours whose sequences can be split evenly",
    )
    async_tensor_model_parallel_allreduce: bool = opt(
        True, "these ranks sum the gradient of a layer's input while that of its weight is computed, not before it"
    )
    context_parallel_size: int = opt(
        1,
        "ranks that share out the tokens of each sample, for long ones: attention gathers keys and values of all of them",
        at_least(1),
        family=("gpt2", "llama"),
    )
    pipe_parallel_size: int = opt(0, "pipeline stages; 0 is no pipeline, 1 a pipeline of one stage", at_least(0))
    partition_method: str = opt(
        "balanced",
        "how layers are cut into stages: balanced (by counted work, embedding and logits included), measured (by time, at the "
        "start), type:REGEX, uniform, parameters, or the cuts, e.g. 0,4,8",
    )
    pipeline_schedule: str = opt(
        "1f1b",
        "order of forward and backward passes: 1f1b, gpipe, interleaved or zb-h1 (tools/draw_schedule.py draws them)",
        one_of("1f1b", "gpipe", "interleaved", "zb-h1"),
    )
    virtual_pipeline_size: int = opt(
        1, "stretches of layers on each pipeline stage, for --pipeline-schedule interleaved", at_least(1)
    )
    pipeline_extra_warmup: int = opt(
        0, "how much farther ahead 1f1b runs, to hide messages; costs memory (tools/draw_schedule.py)", at_least(0)
    )
    pipeline_timeout: float = opt(
        600.0,
        "seconds that one pass or message of a pipeline may take before all ranks end with a report",
        at_least(0.1),
    )
    zero_stage: int | None = opt(
        None, "ZeRO stage; ds_config's, or 0 in fp32 and 1 in mixed precision, if not given", between(0, 3)
    )
    overlap_grad_reduce: bool = opt(
        True,
        "add gradients up over replicas during the last backward pass of a step, not after it: without ZeRO, and with its "
        "stage 1 in fp32 and bf16, which without this flag is DeepSpeed's",
    )
    checkpoint_activations: bool = opt(
        False, "keep only layer inputs and compute activations again in the backward pass"
    )
    checkpoint_num_layers: int = opt(1, "layers between two kept inputs", at_least(1))
    startup_timeout_minutes: float = opt(
        30.0, "until the first step: how long ranks wait for each other, e.g. for a model to be loaded", at_least(0.01)
    )
    distributed_timeout_minutes: float = opt(
        10.0,
        "from the first step on: a collective, and without a pipeline a micro-batch, that takes longer ends the run with a report",
        at_least(0.01),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline_extra_warmup and self.pipeline_schedule != "1f1b":
            raise ConfigError(
                f"--pipeline-extra-warmup is for 1f1b, not for --pipeline-schedule {self.pipeline_schedule}"
            )
        if (self.virtual_pipeline_size > 1) != (self.pipeline_schedule == "interleaved"):
            raise ConfigError(
                f"--virtual-pipeline-size {self.virtual_pipeline_size} does not fit --pipeline-schedule "
                f"{self.pipeline_schedule}: interleaved needs 2 or more, the others 1"
            )
        if self.pipeline_schedule == "zb-h1" and self.checkpoint_activations:
            raise ConfigError(
                "--pipeline-schedule zb-h1 would compute activations again for either half of the backward pass; "
                "use 1f1b with --checkpoint-activations"
            )

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return max(self.pipe_parallel_size, 1)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel replicas. Raises ConfigError if the grid does not fit `world_size`."""
        context = f" x --context-parallel-size {self.context_parallel_size}" if self.context_parallel_size > 1 else ""
        cell = self.stages * self.model_parallel_size * self.context_parallel_size
        if world_size % cell:
            raise ConfigError(
                f"{world_size} ranks cannot be divided into replicas of --pipe-parallel-size "
                f"{self.pipe_parallel_size} x --model-parallel-size {self.model_parallel_size}{context}; "
                f"start a multiple of {cell} ranks"
            )
        return world_size // cell


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Settings of batches, iterations and precision."""

    batch_size: int = opt(4, "samples of one micro-batch", at_least(1))
    gas: int = opt(1, "gradient accumulation steps: micro-batches of one iteration", at_least(1))
    train_iters: int = opt(100000, "iterations (optimizer steps) of the whole run", at_least(0))
    eval_interval: int = opt(1000, "iterations between two evaluations; 0 for none but the last", at_least(0))
    eval_iters: int = opt(10, "global batches of one evaluation; 0 for no evaluation", at_least(0))
    z_loss: float = opt(
        0.0,
        "c of c (log Z)^2 for each target, learned from besides the cross entropy so that logits do not drift; 1e-4 is usual. Losses are "
        "told without it, and it is told apart",
        at_least(0),
    )
    seed: int = opt(1234, "seed of weights, sample order and dropout", at_least(0))
    precision: str = opt(
        "auto",
        "fp32, bf16, fp16 or fp64; auto takes ds_config's, else bf16 where the device is fast at it, else fp32",
        one_of("auto", "fp32", "bf16", "fp16", "fp64"),
    )
    max_skipped_steps: int = opt(
        10,
        "end the run when so many steps in a row had a gradient that is not finite and were not applied; those with which "
        "fp16 looks for its first loss scale do not count",
        at_least(1),
    )
    skip_iterations: tuple[str, ...] | None = opt(
        None, "iterations to pass over, e.g. 41 or 41-50: their samples count as read, but nothing is learned from them"
    )
    skip_samples: tuple[str, ...] | None = opt(
        None, "samples, e.g. 328-335, whose iterations are passed over; the lines of a run name them"
    )
    check_replicas: int = opt(
        0,
        "iterations between two comparisons of the copies of weights on different ranks, which every save begins with; 0 for "
        "only those at saves",
        at_least(0),
    )
    manual_gc_interval: int = opt(
        100,
        "iterations between two collections of Python's garbage, on all ranks at once; 0 leaves it to Python",
        at_least(0),
    )
    compile: bool = opt(
        False, "compile the transformer layers (torch.compile): a slow first step, faster ones after it"
    )
    cpu_matmul: str = opt(
        "auto",
        "what multiplies fp32 matrices on a CPU: torch (its BLAS, MKL), onednn; auto takes the faster one, which some "
        "milliseconds at the first start on a machine find out (kept in ~/.cache/megatron-cpu-matmul.json)",
        one_of("auto", "torch", "onednn"),
    )
    keep_freed_memory: bool = opt(
        True,
        "on a CPU: memory that a step frees is kept for the next one; without it the system clears every page again",
    )
    deepspeed_config: str | None = opt(None, "DeepSpeed's JSON, e.g. configs/ds_config_gpt2.json")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, ranges in (("--skip-iterations", self.skip_iterations), ("--skip-samples", self.skip_samples)):
            for word in ranges or ():
                if not is_range(word):
                    raise ConfigError(f"{name} {word} is no number and no range as 10-12")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, grouped in sections. Field names are unique across sections."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        m, p = self.model, self.parallel
        if m.num_attention_heads % p.model_parallel_size:
            raise ConfigError(
                f"--num-attention-heads {m.num_attention_heads} cannot be split over --model-parallel-size "
                f"{p.model_parallel_size}"
            )
        if problem := heads_problem(m, p.model_parallel_size):
            raise ConfigError(problem)
        if m.ff_size % p.model_parallel_size:
            raise ConfigError(
                f"--ff-hidden-size {m.ff_size} cannot be split over --model-parallel-size {p.model_parallel_size}"
            )
        if m.checkpoint_attention and p.checkpoint_activations:
            raise ConfigError(
                "--checkpoint-activations computes whole layers again, attention with them; leave --checkpoint-attention out"
            )
        if m.offload_activations and p.checkpoint_activations:
            raise ConfigError(
                "--checkpoint-activations leaves nothing that --offload-activations could move; leave one of them out"
            )
        if m.offload_activations and self.train.compile:
            raise ConfigError(
                "--offload-activations cannot look into layers that --compile compiles; leave one of them out"
            )
        for name, there in (
            ("--checkpoint-activations, which recomputes whole layers", p.checkpoint_activations),
            ("--checkpoint-attention, which keeps queries, keys and values", m.checkpoint_attention),
            ("--offload-activations, which keeps them elsewhere", m.offload_activations),
            ("--compile, which chooses what to recompute itself", self.train.compile),
            ("--pipeline-schedule zb-h1, which would recompute for either half", p.pipeline_schedule == "zb-h1"),
        ):
            if m.recompute_modules and there:
                raise ConfigError(f"--recompute-modules cannot be used with {name}; leave one of them out")
        if m.checkpoint_attention and p.pipeline_schedule == "zb-h1":
            raise ConfigError(
                "--pipeline-schedule zb-h1 would compute attention again for either half of the backward pass; use 1f1b "
                "with --checkpoint-attention"
            )
        self._refuse_other_families()
        self._refuse_a_long_fall()
        objectives.refuse_other_objectives(self)
        layers = m.num_layers + (m.decoder_layers if self.is_t5 else 0)
        if p.stages * p.virtual_pipeline_size > layers:
            chunks = f" x --virtual-pipeline-size {p.virtual_pipeline_size}" if p.virtual_pipeline_size > 1 else ""
            flags = f"--num-layers {m.num_layers}" + (
                f" + --num-decoder-layers {m.decoder_layers}" if self.is_t5 else ""
            )
            raise ConfigError(
                f"--pipe-parallel-size {p.pipe_parallel_size}{chunks} is more than {flags}: "
                f"some stages would have no layer"
            )
        self._refuse_too_few_positions()
        self._refuse_uneven_contexts()

    def _refuse_too_few_positions(self) -> None:
        """Raise ConfigError for a sequence that is longer than --max-position-embeddings."""
        d, positions = self.data, self.model.max_position_embeddings
        lengths: dict[str, int | None] = {"--seq-length": d.seq_length}
        if self.is_t5 and d.enc_seq_length:
            lengths = {"--enc-seq-length": d.enc_seq_length, "--dec-seq-length": d.dec_seq_length}
        for name, length in lengths.items():
            if positions is not None and length is not None and length > positions:
                raise ConfigError(f"{name} {length} exceeds --max-position-embeddings {positions}; raise the latter")

    def _refuse_a_long_fall(self) -> None:
        """Raise ConfigError for a WSD schedule whose final decay would begin before its warmup ends."""
        o, total = self.optim, self.lr_decay_iters
        warmup, fall = share_of(o.warmup, total), o.lr_wsd_decay_iters
        if o.lr_decay_style == "wsd" and fall is not None and warmup + fall > total:
            raise ConfigError(
                f"--lr-wsd-decay-iters {fall} after {warmup} iterations of --warmup is more than the {total} of --lr-decay-iters"
            )

    def _refuse_uneven_contexts(self) -> None:
        """Raise ConfigError for a sequence that cannot be split evenly over --context-parallel-size ranks."""
        c, t, s = self.parallel.context_parallel_size, self.parallel.model_parallel_size, self.data.seq_length
        if c > 1 and s % (2 * c):
            raise ConfigError(
                f"--seq-length {s} is no multiple of {2 * c}: each of --context-parallel-size {c} ranks takes two equal stretches "
                f"of a sequence"
            )
        if c > 1 and self.parallel.sequence_parallel and s % (c * t):
            raise ConfigError(
                f"--seq-length {s} is no multiple of {c * t}, over which --context-parallel-size {c} and --sequence-parallel with "
                f"--model-parallel-size {t} share it out"
            )

    def _refuse_other_families(self) -> None:
        """Raise ConfigError listing the settings that differ from their default but that this model family ignores."""
        family = self.model.family
        strange = [
            (flag(f.name), f.metadata["family"])
            for name, section, f in settings()
            if family
            and f.metadata["family"] is not None
            and family not in f.metadata["family"]
            and getattr(getattr(self, name), f.name) != f.default
        ]
        if strange:
            names = ", ".join(name for name, _ in strange)
            raise ConfigError(
                f"{names}: read by {' and '.join(strange[0][1])} only, and this is a {family}; leave {'them' if len(strange) > 1 else 'it'} out"
            )

    def splits_sequences(self, accelerated: bool) -> bool:
        """Return True if model-parallel ranks split the sequence between their layers (sequence parallelism).

        accelerated: False on a CPU, where it is slower and therefore off by default.
        """
        asked, ranks, d = self.parallel.sequence_parallel, self.parallel.model_parallel_size, self.data
        if asked is not None:
            return asked
        lengths = d.seq_length // self.parallel.context_parallel_size, d.enc_seq_length or 0, d.dec_seq_length or 0
        return accelerated and ranks > 1 and self.model.family is not None and not any(n % ranks for n in lengths)

    @property
    def positions(self) -> int:
        """Longest sequence in tokens; with learned positions, the size of their table."""
        d = self.data
        return self.model.max_position_embeddings or max(d.seq_length, d.enc_seq_length or 0, d.dec_seq_length or 0)

    @property
    def objective(self) -> str:
        """Training objective, resolved to the family's default."""
        return self.data.objective or objectives.objectives_of(self.model.family)[0]

    @property
    def is_t5(self) -> bool:
        """True if the family is t5."""
        return self.model.family == "t5"

    @property
    def recomputed_layers(self) -> int:
        """Number of layers between two kept inputs; 0 keeps all activations."""
        return self.parallel.checkpoint_num_layers if self.parallel.checkpoint_activations else 0

    @property
    def lr_decay_iters(self) -> int:
        """Iteration at which the learning-rate decay ends."""
        return self.optim.lr_decay_iters or max(self.train.train_iters, 1)

    def train_batch_size(self, world_size: int) -> int:
        """Return the samples of one iteration: batch size x accumulation steps x data-parallel replicas."""
        return self.train.batch_size * self.train.gas * self.parallel.data_parallel_size(world_size)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all settings by section, in the form of config.json."""
        return {
            name: {f.name: getattr(getattr(self, name), f.name) for f in fields(section)}
            for name, section in SECTIONS.items()
        }


SECTIONS: dict[str, type[Any]] = get_type_hints(Config)


def settings() -> Iterator[tuple[str, type[Any], Any]]:
    """Yield every setting as (section name, section class, dataclass field)."""
    for name, section in SECTIONS.items():
        for f in fields(section):
            yield name, section, f


__all__ = [
    "CheckpointConfig", "Config", "ConfigError", "DataConfig", "LogConfig", "ModelConfig", "OptimConfig", "ParallelConfig",
    "SECTIONS", "TrainConfig", "settings",
]  # fmt: skip

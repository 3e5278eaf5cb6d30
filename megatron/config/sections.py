"""The settings of a run: all sections, checks across sections, and values derived from several sections.

The flags and the JSON keys that `command_line.py` accepts follow from the fields of the sections.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from ..storage import is_url
from .batches import BatchSchedule, parse_entries
from .data import DataConfig, objectives_of
from .fields import ConfigError, flag, refuse
from .model import ModelConfig
from .optim import OptimConfig, share_of
from .output import CheckpointConfig, LogConfig
from .parallel import ParallelConfig
from .train import TrainConfig


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
        refuse(
            self._splits_over_ranks(),
            self._recomputation(),
            self._settings_of_other_families(),
            self._sizes_of_batches(),
            self._decay_of_wsd(),
            self._optimizers_of_mup(),
            self._objectives(),
            self._settings_of_objectives(),
            self._stages_without_layers(),
            self._positions(),
            self._contexts(),
            self._expert_parallelism(),
            self._object_storage(),
        )

    def _splits_over_ranks(self) -> Iterator[str]:
        m = self.model
        ranks = self.parallel.model_parallel_size
        split = f"cannot be split over --model-parallel-size {ranks}"
        if m.num_attention_heads % ranks:
            yield f"--num-attention-heads {m.num_attention_heads} {split}"
        heads = m.key_value_heads  # if there are fewer key/value heads than ranks, several ranks share one
        if heads % ranks and ranks % heads:
            yield f"--num-key-value-heads {heads} {split}: one must be a multiple of the other"
        if ranks > heads and 2 * heads * m.head_size % ranks:
            yield f"--num-key-value-heads {heads} x 2 x --kv-hidden-size {m.head_size} {split}; it must be a multiple"
        if m.ff_size % ranks:
            yield f"--ff-hidden-size {m.ff_size} {split}"
        if m.num_experts and m.expert_ff_size % ranks:
            yield f"--expert-ff-hidden-size {m.expert_ff_size} {split}"

    def _recomputation(self) -> Iterator[str]:
        m = self.model
        p = self.parallel
        splits = p.splits_backward(self.train.gas)
        if splits and p.checkpoint_activations:
            yield (
                f"--pipeline-schedule {p.pipeline_schedule} would recompute activations for each half of the backward "
                "pass; use 1f1b with --checkpoint-activations"
            )
        if m.checkpoint_attention and p.checkpoint_activations:
            yield "--checkpoint-activations recomputes attention with its layer; leave --checkpoint-attention out"
        if m.offload_activations and p.checkpoint_activations:
            yield "--checkpoint-activations leaves nothing for --offload-activations to move; leave one of them out"
        for name, given in (
            ("--checkpoint-activations, which recomputes whole layers", p.checkpoint_activations),
            ("--checkpoint-attention, which keeps queries, keys and values", m.checkpoint_attention),
            ("--offload-activations, which keeps activations elsewhere", m.offload_activations),
            (f"--pipeline-schedule {p.pipeline_schedule}, which splits the backward pass", splits),
        ):
            if m.recompute_modules and given:
                yield f"--recompute-modules cannot be used with {name}; leave one of them out"
        if m.checkpoint_attention and splits:
            yield (
                f"--pipeline-schedule {p.pipeline_schedule} would recompute attention for each half of the backward "
                "pass; use 1f1b with --checkpoint-attention"
            )
        if self.train.precision == "fp8" and m.num_experts:
            yield "--num-experts cannot be used with --precision fp8, whose matmuls need a fixed shape; use bf16"
        if self.train.compile:
            yield from self.conflicts_with_compile()

    def conflicts_with_compile(self, zero_stage: int | None = None) -> Iterator[str]:
        """Yield an error text for each setting that cannot be combined with --compile.

        zero_stage: stage of ZeRO; None if it is not known yet.
        """
        if self.model.offload_activations:
            yield "--offload-activations cannot see activations inside compiled layers; remove one of them"
        if self.model.recompute_modules:
            yield (
                "--recompute-modules cannot be used with --compile, which chooses what to recompute itself; leave one "
                "of them out"
            )
        if self.parallel.splits_backward(self.train.gas):
            name = self.parallel.pipeline_schedule
            yield f"--compile cannot be used with --pipeline-schedule {name}, which splits the backward pass; use 1f1b"
        if self.train.precision == "fp8":
            yield "--compile cannot be used with --precision fp8, whose matmuls are not compiled; use bf16"
        if self.model.num_experts:
            yield "--compile cannot be used with --num-experts, whose shapes depend on the tokens; leave one out"
        if zero_stage == 3:
            yield (
                "--compile cannot be used with ZeRO stage 3, which frees a layer's weights after use; use --zero-stage "
                "2"
            )

    def _settings_of_other_families(self) -> Iterator[str]:
        """Yield an error text if the user changed settings that only other model families read."""
        family = self.model.family
        ignored = [
            (flag(f.name), f.metadata["family"])
            for name, _, f in settings()
            if family and family not in (f.metadata["family"] or (family,))
            if getattr(getattr(self, name), f.name) != f.default
        ]
        if ignored:
            names = ", ".join(name for name, _ in ignored)
            families = " and ".join(ignored[0][1])
            them = "them" if len(ignored) > 1 else "it"
            yield f"{names}: used by {families} only, but this model is a {family}; leave {them} out"

    def _sizes_of_batches(self) -> Iterator[str]:
        given = self.train.batch_size_schedule
        if given is None:
            return
        if self.is_t5 and any(each.start and not each.in_samples for each in parse_entries(given)):
            yield (
                f"--batch-size-schedule {given}: the number of tokens in a sample of a t5 follows from its data; count "
                f"samples instead, such as 5000_samples:64"
            )
            return
        starts = self._batch_schedule(given).starts
        if any(later <= start for start, later in itertools.pairwise(starts)):
            yield (
                f"--batch-size-schedule {given}: the starts do not ascend; in samples of --seq-length "
                f"{self.data.seq_length} tokens, they are {', '.join(map(str, starts))}"
            )

    def _decay_of_wsd(self) -> Iterator[str]:
        o = self.optim
        samples = self.lr_decay_samples
        if o.lr_decay_style != "wsd":
            return
        unit = "iterations"
        decay = o.lr_wsd_decay_iters
        other = o.lr_wsd_decay_samples
        names = "--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-decay-iters"
        if samples is not None:
            unit, decay, other = "samples", other, decay
            names = names[1], names[0], "--lr-decay-samples"
        total = self.lr_decay_iters if samples is None else samples
        warmup = share_of(o.warmup, total)
        if other is not None:
            yield f"{names[1]} {other}: the learning rate follows {unit} here; give {names[0]} instead"
        if decay is not None and warmup + decay > total:
            yield f"{names[0]} {decay} after {warmup} {unit} of --warmup is more than the {total} of {names[2]}"

    def _optimizers_of_mup(self) -> Iterator[str]:
        if self.model.mup_base_hidden_size is not None and self.optim.optimizer == "sgd":
            yield "--mup-base-hidden-size scales learning rates for Adam, not for --optimizer sgd; use adam"

    def _objectives(self) -> Iterator[str]:
        m = self.model
        d = self.data
        known = objectives_of(self.model.family)
        if d.objective is not None and d.objective not in known:
            yield f"--objective {d.objective}: a {m.family or 'custom model'} supports {' or '.join(known)}"
        prefixes = self.objective == "prefix-lm"
        looks_ahead = "--objective prefix-lm lets a prefix look ahead, which"
        if prefixes and not self.is_t5 and m.sliding_window is not None:
            yield (
                f"{looks_ahead} --sliding-window forbids: leave one of them out; --sliding-window none turns off the "
                f"window that a --config file sets"
            )
        if prefixes and self.parallel.context_parallel_size > 1:
            yield f"{looks_ahead} --context-parallel-size does not support yet: leave one of them out"
        if d.reset_position_ids and not d.reset_attention_mask:
            if prefixes and not self.is_t5 and m.position_embedding == "rope":
                yield (
                    "--objective prefix-lm with rotary positions: --reset-position-ids needs --reset-attention-mask, "
                    "too"
                )
            if self.is_t5:
                yield (
                    "--reset-position-ids: a T5 distinguishes documents only with --reset-attention-mask; give both, "
                    "or neither"
                )

    def _settings_of_objectives(self) -> Iterator[str]:
        d = self.data
        if d.fim_rate and self.objective != "lm":
            yield f"--fim-rate rearranges running text, which --objective {self.objective} does not read: leave it out"
        if d.fim_rate and len(set(d.fim_tokens or ())) != 3:
            yield "--fim-rate needs --fim-tokens PREFIX MIDDLE SUFFIX, the names of three special tokens"
        if not d.fim_rate and (d.fim_tokens is not None or d.fim_spm_rate != 0.5):
            yield "--fim-tokens and --fim-spm-rate have no effect alone: give --fim-rate, too"
        if self.objective == "sft" and d.eod_mask_loss:
            yield "--objective sft takes the targets from the corpus: leave --eod-mask-loss out"

    def _stages_without_layers(self) -> Iterator[str]:
        m = self.model
        p = self.parallel
        if m.family is None:
            return  # a custom model may have more layers than --num-layers says
        layers = m.num_layers
        flags = f"--num-layers {m.num_layers}"
        if self.is_t5:
            layers = layers + m.decoder_layers
            flags = f"{flags} + --num-decoder-layers {m.decoder_layers}"
        if p.stages * p.virtual_pipeline_size > layers:
            chunks = f" x --virtual-pipeline-size {p.virtual_pipeline_size}" if p.virtual_pipeline_size > 1 else ""
            yield (
                f"--pipe-parallel-size {p.pipe_parallel_size}{chunks} is more than {flags}: some stages would have "
                "no layer"
            )

    def _positions(self) -> Iterator[str]:
        d = self.data
        positions = self.model.max_position_embeddings
        lengths: dict[str, int | None] = {"--seq-length": d.seq_length}
        if self.is_t5 and d.enc_seq_length:
            lengths = {"--enc-seq-length": d.enc_seq_length, "--dec-seq-length": d.dec_seq_length}
        for name, length in lengths.items():
            if positions is not None and length is not None and length > positions:
                yield f"{name} {length} exceeds --max-position-embeddings {positions}; raise the latter"

    def _expert_parallelism(self) -> Iterator[str]:
        ranks = self.parallel.expert_parallel_size
        experts = self.model.num_experts
        if ranks > 1 and (experts is None or experts % ranks):
            given = "(none)" if experts is None else experts
            yield f"--num-experts {given} cannot be divided among --expert-parallel-size {ranks} ranks"

    def _contexts(self) -> Iterator[str]:
        c = self.parallel.context_parallel_size
        t = self.parallel.model_parallel_size
        s = self.data.seq_length
        if c > 1 and s % (2 * c):
            yield (
                f"--seq-length {s} is not a multiple of {2 * c}: each of --context-parallel-size {c} ranks takes two "
                f"slices of a sequence, all of one length"
            )
        if c > 1 and self.parallel.sequence_parallel and s % (c * t):
            yield (
                f"--seq-length {s} is not a multiple of {c * t}, over which --context-parallel-size {c} and "
                f"--sequence-parallel with --model-parallel-size {t} shard it"
            )

    def _object_storage(self) -> Iterator[str]:
        save = self.checkpoint.save
        run_dir = self.log.run_dir
        if run_dir is not None and is_url(run_dir):
            yield f"--run-dir {run_dir} must be a folder on this machine; --save can name object storage"
        elif save is not None and is_url(save) and run_dir is None:
            yield (
                f"--save {save} needs --run-dir, a folder on this machine for metrics, locks and files on their way to "
                "object storage"
            )

    def splits_sequences(self, accelerated: bool) -> bool:
        """Return whether the run uses sequence parallelism.

        accelerated: whether the device is an accelerator. On a CPU, sequence parallelism is slower and therefore off
        by default.
        """
        asked = self.parallel.sequence_parallel
        ranks = self.parallel.model_parallel_size
        d = self.data
        if asked is not None:
            return asked
        lengths = d.seq_length // self.parallel.context_parallel_size, d.enc_seq_length or 0, d.dec_seq_length or 0
        padded = any(n % ranks for n in lengths)
        return accelerated and ranks > 1 and self.model.family is not None and not padded

    @property
    def positions(self) -> int:
        """Length of the longest sequence that the model can read, in tokens; also the number of learned positions."""
        d = self.data
        return self.model.max_position_embeddings or max(d.seq_length, d.enc_seq_length or 0, d.dec_seq_length or 0)

    @property
    def objective(self) -> str:
        """Training objective; by default, that of the model family."""
        return self.data.objective or objectives_of(self.model.family)[0]

    @property
    def is_t5(self) -> bool:
        """True if the family is t5."""
        return self.model.family == "t5"

    @property
    def recomputed_layers(self) -> int:
        """Number of layers that are recomputed from one stored input; 0 without --checkpoint-activations."""
        return self.parallel.checkpoint_num_layers if self.parallel.checkpoint_activations else 0

    @property
    def lr_decay_iters(self) -> int:
        """Iteration at which the learning-rate decay ends."""
        return self.optim.lr_decay_iters or max(self.train.train_iters, 1)

    @property
    def lr_decay_samples(self) -> int | None:
        """Number of samples after which the learning-rate decay ends; None if the learning rate follows iterations."""
        if self.optim.lr_decay_iters is not None:
            return None
        return self.optim.lr_decay_samples or self.train.train_samples

    def train_batch_size(self, world_size: int) -> int:
        """Return the global batch size: --batch-size x --gas x data-parallel replicas.

        With --batch-size-schedule, this is the largest size of the schedule, once `with_batches` has set --gas.
        """
        return self.train.batch_size * self.train.gas * self.parallel.data_parallel_size(world_size)

    def batches(self, world_size: int) -> BatchSchedule:
        """Return the schedule of the global batch size. Without --batch-size-schedule, it has one size."""
        given = self.train.batch_size_schedule
        return self._batch_schedule(given) if given else BatchSchedule((0,), (self.train_batch_size(world_size),))

    def _batch_schedule(self, text: str) -> BatchSchedule:
        entries = parse_entries(text)
        tokens = self.data.seq_length
        starts = tuple(each.start if each.in_samples else each.start // tokens for each in entries)
        return BatchSchedule(starts, tuple(each.size for each in entries))

    def with_batches(self, world_size: int, iteration: int = 0, consumed: int = 0) -> "Config":
        """Return these settings with --gas and --train-iters as --batch-size-schedule and --train-samples imply them.

        --gas becomes the number of micro-batches of the largest batch.
        iteration, consumed: number of iterations and of samples that the run has done.
        Raises ConfigError if the replicas cannot share a batch of some size, or if no batch fits into --train-samples.
        """
        t = self.train
        if t.batch_size_schedule is None and t.train_samples is None:
            return self
        replicas = self.parallel.data_parallel_size(world_size)
        batches = self.batches(world_size)
        unit = t.batch_size * replicas
        for size in batches.sizes:
            if size % unit:
                raise ConfigError(
                    f"--batch-size-schedule {t.batch_size_schedule}: the size {size} is not a multiple of {unit} = "
                    f"--batch-size {t.batch_size} x {replicas} replicas; change one of them. A resumed run needs only "
                    f"the sizes that lie ahead: begin with 0:SIZE"
                )
        t = replace(t, gas=max(batches.sizes) // unit)
        if t.train_samples is not None:
            if t.train_samples < batches.sizes[0]:
                raise ConfigError(
                    f"--train-samples {t.train_samples} is less than one global batch of {batches.sizes[0]} samples"
                )
            t = replace(t, train_iters=iteration + batches.iterations(consumed, t.train_samples))
        return replace(self, train=t)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all settings by section, as in config.json."""
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
    "CheckpointConfig", "Config", "ConfigError", "DataConfig", "LogConfig", "ModelConfig", "OptimConfig",
    "ParallelConfig", "SECTIONS", "TrainConfig", "settings",
]  # fmt: skip

"""The settings of a run: all sections, checks across sections, and values derived from several sections.

The flags and the JSON keys that `command_line.py` accepts follow from the fields of the sections.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from .batches import BatchSchedule, parse_entries
from .conflicts import conflicts
from .data import DataConfig, objectives_of
from .feature_settings import FeatureSettings, conflicts_with_features, with_features
from .fields import ConfigError, flag, refuse
from .model import ModelConfig
from .optim import OptimConfig
from .output import CheckpointConfig, LogConfig
from .parallel import ParallelConfig
from .train import TrainConfig

S = TypeVar("S", bound=FeatureSettings)

if not TYPE_CHECKING:
    ModelConfig = with_features("model", ModelConfig)
    ParallelConfig = with_features("parallel", ParallelConfig)
    DataConfig = with_features("data", DataConfig)
    TrainConfig = with_features("train", TrainConfig)
    OptimConfig = with_features("optim", OptimConfig)
    CheckpointConfig = with_features("checkpoint", CheckpointConfig)
    LogConfig = with_features("log", LogConfig)


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
            self._settings_of_other_families(),
            self._sizes_of_batches(),
            self._stages_without_layers(),
            self._positions(),
            conflicts(self),
            conflicts_with_features(self),
        )

    def of(self, kind: type[S]) -> S:
        """Return the section that has the settings of a feature, `kind`."""
        for section in vars(self).values():
            if isinstance(section, kind):
                return section
        raise TypeError(f"no row of megatron/config/feature_table.py leads to {kind.__name__}")

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

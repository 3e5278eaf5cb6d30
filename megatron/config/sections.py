"""The settings of a run: all sections, checks across sections, and values derived from several sections.

The flags and the JSON keys that `command_line.py` accepts follow from the fields of the sections.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from .batches import BatchSchedule, parse_batch_schedule
from .conflicts import conflicts
from .contradictions import contradictions, scheduled_train_section
from .data import DataConfig, objectives_of
from .feature_settings import FeatureSettings, conflicts_with_features, with_features
from .fields import ConfigError, raise_first_problem
from .model import ModelConfig
from .optim import OptimConfig
from .output import CheckpointConfig, LogConfig
from .parallel import ParallelConfig
from .train import TrainConfig

S = TypeVar("S", bound=FeatureSettings)

# A feature declares its settings in its own file. mypy sees the plain classes, so code reads them by `Config.of`.
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
        raise_first_problem(contradictions(self), conflicts(self), conflicts_with_features(self))

    def of(self, kind: type[S]) -> S:
        """Return the section that has the settings of a feature. kind: the feature's class of settings."""
        for section in vars(self).values():
            if isinstance(section, kind):  # `with_features` makes the section a subclass of `kind`
                return section
        raise TypeError(f"no row of megatron/config/feature_table.py leads to {kind.__name__}")

    @property
    def positions(self) -> int:
        """Length of the longest sequence that the model can read, in tokens; also the number of learned positions."""
        d = self.data
        longest = max(d.seq_length, d.enc_seq_length or 0, d.dec_seq_length or 0)
        return self.model.max_position_embeddings or longest

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

        With --batch-size-schedule, this is the largest size of the schedule, once `with_derived_iters` has set --gas.
        """
        return self.train.batch_size * self.train.gas * self.parallel.data_parallel_size(world_size)

    def batch_schedule(self, world_size: int) -> BatchSchedule:
        """Return the schedule of the global batch size. Without --batch-size-schedule, it has one size."""
        schedule = self.train.batch_size_schedule
        if schedule is None:
            return BatchSchedule(starts=(0,), sizes=(self.train_batch_size(world_size),))
        return parse_batch_schedule(schedule, self.data.seq_length)

    def with_derived_iters(self, world_size: int, iteration: int = 0, consumed: int = 0) -> "Config":
        """Return these settings with --gas and --train-iters as --batch-size-schedule and --train-samples imply them.

        --gas becomes the number of micro-batches of the largest batch.
        iteration, consumed: number of iterations and of samples that the run has done.
        Raises ConfigError if the replicas cannot share a batch of some size, or if no batch fits into --train-samples.
        """
        train = self.train
        if train.batch_size_schedule is None and train.train_samples is None:
            return self
        return replace(self, train=scheduled_train_section(self, world_size, iteration, consumed))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all settings by section, as in config.json."""
        return asdict(self)


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

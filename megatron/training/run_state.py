"""The class `Run`, which holds everything that belongs to one run, from its settings to its locks."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import mpu
from ..checkpointing import RetryingSaver, TrainState
from ..config import Config
from ..config.batches import BatchSchedule
from ..config.ds_config import Resolved
from ..engines.engine import Engine
from ..locks.run_lock import RunLock
from ..optim import lr_at
from ..ranks.agreement import raise_on_all_ranks
from ..ranks.signals import StopSignals
from ..timers import Timers
from ..tokenizer import Tokenizer
from .features import Features
from .metrics import MetricsWriter
from .remote_datasets import t5_lengths
from .run_folder import release
from .task import Datasets

if TYPE_CHECKING:
    from .log import TrainingLog


@dataclass
class Run:
    """Settings, engine, data, state and output of one run."""

    config: Config
    resolved: Resolved
    device: torch.device
    engine: Engine
    datasets: Datasets
    state: TrainState
    saver: RetryingSaver
    timers: Timers
    metrics: MetricsWriter
    tokenizer: Tokenizer
    run_dir: Path
    parameters: int  # number of parameters of the whole model; tied parameters count once
    locks: list[RunLock]  # locks that rank 0 holds; empty on other ranks
    features: Features
    stop: bool = False  # True if the run ends after this iteration
    log: "TrainingLog" = field(init=False)  # set when training begins

    def __post_init__(self) -> None:
        self.signals = StopSignals(self.config.checkpoint.exit_duration_in_mins, self.device)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, *_: object) -> None:
        """Close the run's files and unlock its directory. Raises RunError on all ranks if metrics.jsonl lacks rows."""
        lost = self.metrics.close(error, self)  # number of rows that could not be written
        release(self.locks)
        if error:
            return  # other ranks may have no error, and would not come here
        with raise_on_all_ranks():  # rank 0 alone writes rows
            if lost:
                raise ValueError(f"{lost} last rows of {self.run_dir}/metrics.jsonl were not written; a note says why")

    @property
    def sample_shape(self) -> tuple[int, int]:
        """Numbers of tokens of a sample: (encoder, decoder) for T5, (--seq-length, 0) for other models."""
        return t5_lengths(self.datasets[0]) or (self.config.data.seq_length, 0)

    @cached_property
    def batch_schedule(self) -> BatchSchedule:
        """Schedule of the global batch size."""
        return self.config.batch_schedule(dist.get_world_size())

    @property
    def global_batch_size(self) -> int:
        """Number of samples of the next iteration over all replicas."""
        return self.batch_schedule.size_at(self.state.consumed_samples)

    def num_micro_batches(self, first: int) -> int:
        """Return the number of micro-batches of a replica in the iteration whose first sample is `first`."""
        samples_per_micro_batch = self.config.train.batch_size * mpu.get_topology().replicas
        return self.batch_schedule.size_at(first) // samples_per_micro_batch

    def lr(self, iteration: int, first: int) -> float:
        """Return the learning rate of optimizer step `iteration`, counted from 0, whose first sample is `first`."""
        # `lr_at` ends the decay with this step if the next one would end after it.
        consumed_after_step = self.batch_schedule.advance(first, 1)
        consumed_after_next_step = self.batch_schedule.advance(first, 2)
        return lr_at(iteration, self.config, (consumed_after_step, consumed_after_next_step))

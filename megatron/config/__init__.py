"""Settings of a run: their definitions, parsing (command line, JSON, flags of other frameworks) and validation.

A `Config` is built once, is immutable and is passed explicitly to the code that reads it.
"""

from .model import ModelConfig
from .sections import (
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    settings,
)
from .source import with_family

__all__ = [
    "SECTIONS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "settings",
    "with_family",
]

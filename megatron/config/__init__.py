"""Settings: what there is to set, how a command line, a file or another program's flags say it, and what they must fulfil.

A `Config` is made once, is never changed, and is handed to whoever needs it.
"""

from .model import ModelConfig, with_family
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

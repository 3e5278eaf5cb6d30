"""What we train: a task for each family of models, found by the name that settings and checkpoints carry."""

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2
from .t5 import T5

TASKS: dict[str, type[Task]] = {"gpt2": GPT2, "t5": T5}


def task_of(config: Config) -> Task:
    """The task of these settings, by their family. A model of another family reads text as GPT-2 does."""
    return TASKS["t5" if config.is_t5 else "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "task_of"]

"""What we train: a task for each family of models, found by the name that settings and checkpoints carry."""

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2
from .llama import Llama
from .t5 import T5

TASKS: dict[str, type[Task]] = {"gpt2": GPT2, "llama": Llama, "t5": T5}


def task_of(config: Config) -> Task:
    """The task of these settings, by their family. A model of no family reads text as GPT-2 does."""
    return TASKS[config.model.family or "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "Llama", "task_of"]

"""Training tasks, one per model family. `TASKS` maps the family name in settings and checkpoints to a task class."""

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2, Llama
from .t5 import T5

TASKS: dict[str, type[Task]] = {"gpt2": GPT2, "llama": Llama, "t5": T5}


def task_of(config: Config) -> Task:
    """Return the task of the model family in `config`, or GPT-2's task if no family is set."""
    return TASKS[config.model.family or "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "Llama", "task_of"]

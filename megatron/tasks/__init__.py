"""Training tasks, one per model family, looked up by the family name in settings and checkpoints."""

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2, Llama
from .t5 import T5

TASKS: dict[str, type[Task]] = {"gpt2": GPT2, "llama": Llama, "t5": T5}


def task_of(config: Config) -> Task:
    """Return the task of the configured family; a model without a family uses GPT-2's task."""
    return TASKS[config.model.family or "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "Llama", "task_of"]

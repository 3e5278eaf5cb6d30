"""Training tasks, one per model family. `TASKS` maps the family name in settings and checkpoints to a task class."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2, Llama

if TYPE_CHECKING:
    from .t5 import T5


class _Tasks(Mapping[str, type[Task]]):
    """Task class by model family; the task of T5 is imported on first use."""

    _names = {"gpt2": "GPT2", "llama": "Llama", "t5": "T5"}

    def __getitem__(self, family: str) -> type[Task]:
        name = self._names[family]
        return globals().get(name) or __getattr__(name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


TASKS: Mapping[str, type[Task]] = _Tasks()


def __getattr__(name: str) -> Any:
    if name != "T5":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .t5 import T5

    return T5


def task_of(config: Config) -> Task:
    """Return the task of the model family in `config`, or GPT-2's task if no family is set."""
    return TASKS[config.model.family or "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "Llama", "task_of"]

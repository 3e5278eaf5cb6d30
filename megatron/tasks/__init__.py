"""Training tasks, one per model family. `TASKS` maps the family name in settings and checkpoints to a task class."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..training.task import Task
from .gpt2 import GPT2

if TYPE_CHECKING:
    from .llama import Llama
    from .t5 import T5


class _Tasks(Mapping[str, type[Task]]):
    """Task class by model family; the tasks of Llama and T5 are imported on first use."""

    _names = {"gpt2": "GPT2", "llama": "Llama", "t5": "T5"}

    def __getitem__(self, family: str) -> type[Task]:
        return resolve_name(f"{__name__}:{self._names[family]}")  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


TASKS: Mapping[str, type[Task]] = _Tasks()


def __getattr__(name: str) -> Any:
    if name not in ("Llama", "T5"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{name.lower()}", __name__), name)


def task_of(config: Config) -> Task:
    """Return the task of the model family in `config`, or GPT-2's task if no family is set."""
    return TASKS[config.model.family or "gpt2"]()


__all__ = ["GPT2", "T5", "TASKS", "Llama", "task_of"]

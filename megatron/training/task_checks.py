"""Checks of a task: that it overrides the methods that a run needs, and that they return what they should."""

from typing import Any, cast

from torch import nn
from torch.utils.data import IterableDataset

from ..config import Config
from ..tokenizer import Tokenizer
from .task import Datasets, Task, describe


def check_task(task: Any, *methods: str) -> None:
    """Raise ValueError unless `task` is an instance of a subclass of Task that overrides `methods`."""
    if not isinstance(task, Task):
        given = f"the class {task.__name__}: run({task.__name__}())" if isinstance(task, type) else describe(task)
        raise ValueError(f"a task is an object of a subclass of megatron.training.Task, not {given}")
    for method in methods:
        if getattr(type(task), method) is getattr(Task, method):
            raise ValueError(f"{type(task).__name__} has no {method}(); docs/own_model.md shows what a task needs")


def checked_datasets(task: Task, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
    """Return the result of `task.datasets`. Raises ValueError unless it is ((three data sets), notes)."""
    result: Any = task.datasets(config, tokenizer)
    name = type(task).__name__
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    if not is_pair or not isinstance(result[1], (tuple, list)):
        raise ValueError(
            f"{name}.datasets returns {describe(result)}: return two objects, first a tuple of three data sets, "
            "second a list of notes"
        )
    datasets, notes = result
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        raise ValueError(
            f"{name}.datasets returns {describe(datasets)} as data sets: return three data sets, for training, "
            "validation and test; an empty data set is None"
        )
    if datasets[0] is None and config.train.train_iters:
        raise ValueError(
            f"there is no training data set, but --train-iters is {config.train.train_iters}: {name}.datasets "
            f"must return one"
        )
    for each in datasets:
        if each is not None and (isinstance(each, IterableDataset) or not hasattr(each, "__getitem__")):
            raise ValueError(
                f"{name}.datasets returns a {type(each).__name__}: return data sets with dataset[n] for any n >= 0"
            )
    return cast(Datasets, tuple(datasets)), list(notes)


def checked_model(task: Task, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
    """Return the result of `task.model`. Raises ValueError if it is not an nn.Module."""
    model: Any = task.model(config, tokenizer)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is {describe(model)}: {type(task).__name__}.model must return an nn.Module")
    return model

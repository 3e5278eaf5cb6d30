"""What a run trains: its data, its model and its loss, as one object."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ..config import Config
from ..model.loss import count_targets

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Datasets = tuple[Any, Any, Any]
Batch = dict[str, Tensor]


class Task:
    """Subclass it, and `run(YourTask())` trains it in any layout. `megatron.tasks` has those of GPT-2 and T5.

    config: all settings. tokenizer: that of --vocab-file, or what `extended` made of it.
    name: of the default run directory, runs/<name>-<time>.
    defaults: settings whose default is another for this task; flags still win. `family` says which model it is.
    `count_targets = None` says that `loss`, and the loss function of the pipeline, are means, and not sums over targets.
    """

    name: str = "model"
    defaults: Mapping[str, Any] = {}
    reads_alone = False  # see `datasets`
    shares_out_tokens = False  # of a context group, `batch` gives each rank its own tokens, and the model knows of it

    def extended(self, config: Config, tokenizer: "Tokenizer") -> "Tokenizer":
        """The tokenizer of the task, e.g. with more special tokens."""
        return tokenizer

    def datasets(self, config: Config, tokenizer: "Tokenizer") -> tuple[Datasets, list[str]]:
        """Those of training, validation and test, each None where it stays empty; and notes for the user.

        A dataset answers `[n]` for any n >= 0 with a dict of tensors. All ranks call this at once; with `reads_alone = True`
        only those that read data do, rank 0 before the others, so that a large corpus is opened, and looked through, where
        it is needed: then it must not send messages to other ranks, nor leave anything on the task.
        """
        raise NotImplementedError

    def model(self, config: Config, tokenizer: "Tokenizer | None") -> nn.Module:
        """A plain module, or a `PipelineModule` if --pipe-parallel-size is not 0. Its layers draw their own weights."""
        raise NotImplementedError

    def batch(self, data: Batch | None, config: Config, tokenizer: "Tokenizer | None") -> tuple[Any, Any]:
        """A micro-batch as (inputs of the first layer, targets of the loss), on the device of this rank.

        data: what the datasets gave, stacked. One rank of a model-parallel group reads; it is None on the others, which
        get it by `mpu.broadcast_data`. Called once for each micro-batch.
        """
        raise NotImplementedError

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """The sum of the loss over the targets of a micro-batch, a scalar; used without a pipeline.

        This one is for a model that takes `labels` [b, s] and gives the loss [b, s] of each; write your own for another.
        Under a pipeline the `loss_fn` of the PipelineModule computes it.
        """
        inputs, (labels, loss_mask) = batch
        total: Tensor = (model(*inputs, labels=labels) * loss_mask).sum()
        return total

    def count_targets(self, batch: Any) -> Tensor:
        """How many targets a micro-batch has, a scalar in fp64; of labels and their loss mask."""
        return count_targets(batch[1])

    def checked_batch(self, data: Batch | None, config: Config, tokenizer: "Tokenizer | None") -> Any:
        """What `batch` gives. Raises ValueError if that is not a pair."""
        made: Any = self.batch(data, config, tokenizer)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ValueError(f"{_name(self)}.batch returns {what(made)}: return (inputs of the first layer, targets)")
        return made

    def checked_loss(self, model: Any, batch: Any) -> Tensor:
        """What `loss` gives. Raises ValueError if nothing can be learned from that."""
        found: Any = self.loss(model, batch)
        if not isinstance(found, Tensor) or found.dim():
            raise ValueError(f"{_name(self)}.loss returns {what(found)}: return a tensor of one number")
        return found


def _name(task: Task) -> str:
    return type(task).__name__


def what(found: Any) -> str:
    """Of an object that is not what was asked for, in a few words."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    return f"{len(found)} things" if isinstance(found, (tuple, list)) else type(found).__name__


def check_task(task: Any, *methods: str) -> None:
    """Raise ValueError unless `task` is one, with these methods."""
    if not isinstance(task, Task):
        given = f"the class {task.__name__}: run({task.__name__}())" if isinstance(task, type) else what(task)
        raise ValueError(f"a task is an object of a subclass of megatron.training.Task, not {given}")
    for method in methods:
        if getattr(type(task), method) is getattr(Task, method):
            raise ValueError(f"{_name(task)} has no {method}(); docs/own_model.md shows what a task needs")


def checked_datasets(task: Task, config: Config, tokenizer: "Tokenizer") -> tuple[Datasets, list[str]]:
    """What `datasets` gives. Raises ValueError if that is not three data sets and notes."""
    made: Any = task.datasets(config, tokenizer)
    pair = isinstance(made, (tuple, list)) and len(made) == 2
    if not pair or not isinstance(made[1], (tuple, list)):
        raise ValueError(
            f"{_name(task)}.datasets returns {what(made)}: return the three data sets as a tuple, and a list of notes"
        )
    if not isinstance(made[0], (tuple, list)) or len(made[0]) != 3:
        raise ValueError(
            f"there are {what(made[0])} where three data sets are wanted, of training, validation and test: None for one that "
            f"is empty"
        )
    if made[0][0] is None and config.train.train_iters:
        raise ValueError("there is no data set of training, but --train-iters asks for training")
    return cast(Datasets, tuple(made[0])), list(made[1])


def checked_model(task: Task, config: Config, tokenizer: "Tokenizer | None") -> nn.Module:
    """What `model` gives. Raises ValueError if that is no module."""
    made: Any = task.model(config, tokenizer)
    if not isinstance(made, nn.Module):
        raise ValueError(f"the model is {what(made)}: {_name(task)}.model must return an nn.Module")
    return made

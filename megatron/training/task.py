"""The class `Task`: the data sets, the model, the batches and the loss of a run as one object."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..config import Config
from ..model.loss import count_targets
from ..tokenizer import Tokenizer

Datasets = tuple[Any, Any, Any]
Batch = dict[str, Tensor]


class Task:
    """Base class of tasks: `run(YourTask())` trains a model with any kind of parallelism.

    `megatron.tasks` contains the tasks of GPT-2, Llama and T5.
    name: part of the default run directory, runs/<name>-<time>.
    defaults: default settings of this task; flags override them. `family` names the model family.
    `count_targets = None` declares that `loss`, and the loss function of the pipeline, return means over targets
    instead of sums.
    The methods get `config` with all settings, and `tokenizer`, loaded from --vocab-file and passed through `extended`.
    """

    name: str = "model"
    defaults: Mapping[str, Any] = {}
    reads_alone = False  # True if only ranks that read data call `datasets`
    shares_out_tokens = False  # True if `batch` shards tokens over context-parallel ranks and the model supports this
    makes_batches = True  # True if `batch` makes the batches, False if the model's `_megatron_batch_fn` makes them

    def extended(self, config: Config, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer of the task, e.g. `tokenizer` with additional special tokens."""
        return tokenizer

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Return ((training, validation, test) data sets, notes to print); an empty data set is None.

        `dataset[n]` must return a dict of tensors for any n >= 0. All ranks call this method at the same time.
        With `reads_alone = True`, only ranks that read data call it, and rank 0 calls it first. Then the method must
        not communicate with other ranks, and must not set attributes of the task.
        """
        raise NotImplementedError

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        """Return the model: a plain module, or a `PipelineModule` if --pipe-parallel-size is not 0.

        The layers of the model must initialise their weights.
        """
        raise NotImplementedError

    def batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> tuple[Any, Any]:
        """Return a micro-batch as (inputs of the first layer, targets of the loss), on the device of this rank.

        This method is called once for each micro-batch.
        data: collated samples of the data set. Only one rank of a model-parallel group reads data; on its other ranks,
        `data` is None. `mpu.broadcast_data` sends the tensors to these ranks.
        """
        raise NotImplementedError

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """Return the sum of the loss over the targets of a micro-batch, a scalar.

        This default is for a model that takes `labels` [b, s] and returns the loss [b, s] of each label; override it
        for other models. With a pipeline, the `loss_fn` of the PipelineModule computes the loss instead.
        """
        inputs, (labels, loss_mask) = batch
        total: Tensor = (model(*inputs, labels=labels) * loss_mask).sum()
        return total

    def count_targets(self, batch: Any) -> Tensor:
        """Return the number of targets of a micro-batch, a scalar in fp64, from its labels and loss mask."""
        return count_targets(batch[1])

    def checked_batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> Any:
        """Return the result of `batch`. Raises ValueError if it is not a pair."""
        batch: Any = self.batch(data, config, tokenizer)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                f"{type(self).__name__}.batch returns {describe(batch)}: return (inputs of the first layer, targets)"
            )
        return batch

    def checked_loss(self, model: Any, batch: Any) -> Tensor:
        """Return the result of `loss`. Raises ValueError if it is not a scalar tensor."""
        loss: Any = self.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"{type(self).__name__}.loss returns {describe(loss)}: return a tensor of one number")
        return loss


def describe(value: Any) -> str:
    """Return a few words that describe an object of the wrong type, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{len(value)} objects" if isinstance(value, (tuple, list)) else type(value).__name__

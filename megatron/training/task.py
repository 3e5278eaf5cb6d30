"""What a run trains: its data, its model and its loss, as one object."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    """

    name: str = "model"
    defaults: Mapping[str, Any] = {}

    def extended(self, config: Config, tokenizer: "Tokenizer") -> "Tokenizer":
        """The tokenizer of the task, e.g. with more special tokens."""
        return tokenizer

    def datasets(self, config: Config, tokenizer: "Tokenizer") -> tuple[Datasets, list[str]]:
        """Those of training, validation and test, each None where it stays empty; and notes for the user.

        A dataset answers `[n]` for any n >= 0 with a dict of tensors.
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

        This one is for a model that takes `labels` [b, s] and gives the loss [b, s] of each.
        """
        inputs, (labels, loss_mask) = batch
        total: Tensor = (model(*inputs, labels=labels) * loss_mask).sum()
        return total

    def count_targets(self, batch: tuple[Any, Any]) -> Tensor | None:
        """How many targets a micro-batch has, a scalar in fp64. None: `loss` gives a mean, and all micro-batches weigh the same."""
        return count_targets(batch[1])

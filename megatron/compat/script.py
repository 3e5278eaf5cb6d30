"""Tasks that call an entry script's functions.

`FunctionsTask` serves any script. `ScriptTask` serves scripts written for CPM-Pretrain, whose data-set provider takes
the numbers of samples as an argument.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import mpu
from ..config import Config
from ..config.defaults import DEFAULTS
from ..data.blend import BlendedDataset
from ..data.gpt2_dataset import GPT2Dataset
from ..ranks.rank_0 import print_rank_0
from ..tokenizer import SentinelTokenizer, Tokenizer
from ..training.global_vars import get_tokenizer
from ..training.task import Batch, Datasets, Task, what
from ..utils import get_ltor_documents_and_position_ids
from .data import T5Samples

ForwardStep = Callable[[Iterator[Batch] | None, Any], tuple[Tensor, Any]]
CountTargets = Callable[[Batch | None], Tensor]
TokenizerProvider = Callable[[Config, Tokenizer], Tokenizer]
FAMILIES = {"T5Tokenizer": "t5"}  # tokenizer_type in args_defaults -> model family


def is_original(provider: Callable[..., Any]) -> bool:
    """Return whether a data-set provider is written for CPM-Pretrain: it then requires the numbers of samples."""
    try:
        parameters = inspect.signature(provider).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def numbers_of_samples(config: Config, ranks: int) -> list[int]:
    """Return [training, validation, test]: how many samples a whole run on `ranks` ranks reads of each data set."""
    t = config.train
    batch = config.train_batch_size(ranks)
    train = config.batches(ranks).after(0, t.train_iters)
    evaluations = t.train_iters // t.eval_interval + 1 if t.eval_interval else 1
    return [train, evaluations * t.eval_iters * batch, t.eval_iters * batch]


class FunctionsTask(Task):
    """Task that calls a script's functions, which may use `get_args()`, `get_tokenizer()` and `get_timers()`."""

    makes_batches = False

    def __init__(
        self,
        datasets_provider: Callable[[], Datasets],
        model_provider: Callable[[], nn.Module],
        forward_step: ForwardStep | None,
        defaults: Mapping[str, Any],
        name: str,
        count_targets: CountTargets | None = None,
        tokenizer_provider: TokenizerProvider | None = None,
    ) -> None:
        self.datasets_provider = datasets_provider
        self.model_provider = model_provider
        self.forward_step: ForwardStep = forward_step or _no_forward_step
        self.count_targets = count_targets  # type: ignore[assignment,method-assign]
        self.tokenizer_provider = tokenizer_provider
        self.defaults = defaults
        self.name = name
        self._noted = False

    def extended(self, config: Config, tokenizer: Tokenizer) -> Tokenizer:
        return self.tokenizer_provider(config, tokenizer) if self.tokenizer_provider else tokenizer

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        return self.datasets_provider(), []

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        return self.model_provider()

    def batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> Any:
        """Return the batch unchanged: the script's own functions process it."""
        return data

    checked_batch = batch

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss that `forward_step` computes. Raises ValueError if it returns no loss."""
        found: Any = self.forward_step(None if batch is None else _one_batch(batch), model)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise ValueError(
                f"forward_step returns {what(found)}: return (loss, anything), for example `return loss, {{}}`"
            )
        loss, named = found
        if not isinstance(loss, Tensor) or loss.dim():
            raise ValueError(f"forward_step returns {what(loss)} as the loss: return a tensor of one number")
        self._note_what_is_not_logged(named)
        return loss

    def _note_what_is_not_logged(self, named: Any) -> None:
        """Print, once in a run, that values which `forward_step` returns besides the loss are not logged."""
        if self._noted or not isinstance(named, dict):
            return
        self._noted = True
        others = [str(name) for name in named if name != "lm loss"]
        if others:
            print_rank_0(
                f"note: forward_step returns {', '.join(others)} besides the loss; these values are not logged; "
                f"let the model return them from get_additional_losses()"
            )


def _no_forward_step(batches: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Any]:
    """Raise ValueError: no `forward_step` was given, but a model without a pipeline needs this function."""
    raise ValueError(
        "pretrain() has no forward_step, which a model without a pipeline needs: pass it as the third argument"
    )


def _one_batch(batch: Batch) -> Iterator[Batch]:
    """Yield the micro-batch of one call of `forward_step`. Raises ValueError if the call reads a second batch."""
    yield batch
    raise ValueError(
        "forward_step reads a second batch in one call: read only one, as forward_step is called for each micro-batch"
    )


class ScriptTokenizer(SentinelTokenizer):
    """Tokenizer with sentinels that also has the attributes of CPM-Pretrain's T5 tokenizer."""

    @property
    def eod_id(self) -> int:
        """Id of the end-of-document token."""
        return self.eod

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.pad

    def get_sentinel_id(self, number: int) -> int:
        """Return the id of the sentinel of span `number`, counted from 0."""
        return self.sentinels[number]


class _Counted(NamedTuple):
    """A micro-batch as the data loader returns it, and its number of target tokens, a scalar in fp64."""

    data: Batch | None
    targets: Tensor


class ScriptTask(FunctionsTask):
    """Task that calls the functions of a script whose `forward_step` returns the mean loss over the target tokens.

    If the script uses this project's data sets, each micro-batch is weighted by its number of target tokens. The loss
    is then the same in every parallel layout.
    """

    def __init__(
        self,
        datasets_provider: Callable[..., Datasets],
        model_provider: Callable[[], nn.Module],
        forward_step: ForwardStep | None,
        defaults: Mapping[str, Any],
        name: str,
    ) -> None:
        self.family = FAMILIES.get(defaults.get("tokenizer_type", ""))
        own = DEFAULTS[self.family] if self.family else {}
        super().__init__(datasets_provider, model_provider, forward_step, {**own, **defaults}, self.family or name)
        self._count: Callable[[Batch, Config], Tensor] | None = None

    def extended(self, config: Config, tokenizer: Tokenizer) -> Tokenizer:
        """Return the tokenizer; for the family t5, padding and sentinel tokens are added to it."""
        if self.family != "t5":
            return tokenizer
        return ScriptTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Call the provider with the run's numbers of samples; return its data sets and an empty list of notes."""
        provider: Any = self.datasets_provider
        datasets = provider(numbers_of_samples(config, dist.get_world_size()))
        self._count = _counter(datasets[0]) if isinstance(datasets, (tuple, list)) and datasets else None
        if self._count:
            self.count_targets = lambda batch: batch.targets  # type: ignore[method-assign]
        return datasets, []

    def batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> Any:
        """Return `data`, together with its number of target tokens if the script uses this project's data sets."""
        if self._count is None:
            return data
        number = None if data is None else {"targets": self._count(data, config).long().view(1)}
        found = mpu.broadcast_data(["targets"], number, torch.int64, sizes={"targets": (1,)})
        return _Counted(data, found["targets"].view(()).double())

    checked_batch = batch

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss summed over target tokens if `batch` has their number, else the mean loss of the script."""
        if not isinstance(batch, _Counted):
            return super().loss(model, batch)
        return super().loss(model, batch.data) * batch.targets.float()


def _counter(dataset: Any) -> Callable[[Batch, Config], Tensor] | None:
    """Return a function that counts the target tokens of a micro-batch; None if `dataset` is a custom data set."""
    members = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    if isinstance(dataset, T5Samples):
        return _t5_targets
    return _gpt2_targets if all(isinstance(member, GPT2Dataset) for member in members) else None


def _gpt2_targets(data: Batch, config: Config) -> Tensor:
    tokens = data["text"][:, :-1]
    _, loss_mask, _ = get_ltor_documents_and_position_ids(
        tokens, get_tokenizer().eod, False, False, config.data.eod_mask_loss
    )
    return loss_mask.sum(dtype=torch.float64)


def _t5_targets(data: Batch, config: Config) -> Tensor:
    tokenizer: Any = get_tokenizer()
    counted: Tensor = (data["targets"] != tokenizer.eod) & (data["labels"] != tokenizer.pad)
    return counted.sum(dtype=torch.float64)

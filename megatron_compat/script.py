"""The task of scripts written for CPM-Pretrain, whose data-set provider takes the numbers of samples as an argument."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.config import Config
from megatron.config.defaults import DEFAULTS
from megatron.data.blend import BlendedDataset
from megatron.data.gpt2_dataset import GPT2Dataset
from megatron.tasks.functions import ForwardStep, FunctionsTask, TokenizerProvider
from megatron.tokenizer import SentinelTokenizer, Tokenizer
from megatron.training.global_vars import get_tokenizer
from megatron.training.task import Batch, Datasets
from megatron.utils import get_ltor_documents_and_position_ids

from .data import T5Samples

FAMILIES = {"T5Tokenizer": "t5"}  # tokenizer_type in args_defaults -> model family


def numbers_of_samples(config: Config, ranks: int) -> list[int]:
    """Return [training, validation, test]: how many samples a whole run on `ranks` ranks reads of each data set."""
    train = config.train
    batch_size = config.train_batch_size(ranks)
    # The position in the data after all iterations, counted from sample 0: the batch size may change on the way.
    train_samples = config.batch_schedule(ranks).advance(0, train.train_iters)
    # One evaluation follows the last iteration, besides those at each interval.
    evaluations = 1
    if train.eval_interval:
        evaluations += train.train_iters // train.eval_interval
    samples_per_evaluation = train.eval_iters * batch_size
    return [train_samples, evaluations * samples_per_evaluation, samples_per_evaluation]


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


class _CountedBatch(NamedTuple):
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
        tokenizer_provider: TokenizerProvider | None = None,
    ) -> None:
        # None unless the script is one for T5: scripts of CPM-Pretrain do not name the family of their model.
        self.family = FAMILIES.get(defaults.get("tokenizer_type", ""))
        all_defaults = dict(defaults)
        if self.family:
            # Defaults of the script take precedence. CPM-Pretrain has only CPM's format of spans.
            all_defaults = {**DEFAULTS[self.family], "span_convention": "cpm", **defaults}
        super().__init__(
            datasets_provider,
            model_provider,
            forward_step,
            all_defaults,
            self.family or name,
            None,  # count_targets, which `datasets` sets if it can count
            tokenizer_provider,
        )
        self._count_batch: Callable[[Batch, Config], Tensor] | None = None

    def extended(self, config: Config, tokenizer: Tokenizer) -> Tokenizer:
        """Return the provider's tokenizer; for the family t5, padding and sentinel tokens are added to it."""
        tokenizer = super().extended(config, tokenizer)
        if self.family != "t5":
            return tokenizer
        return ScriptTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Call the provider with the run's numbers of samples; return its data sets and an empty list of notes."""
        provider: Any = self.datasets_provider
        datasets = provider(numbers_of_samples(config, dist.get_world_size()))
        self._count_batch = None
        if isinstance(datasets, (tuple, list)) and datasets:
            self._count_batch = _target_counter(datasets[0])
        # With `count_targets`, `loss` returns a sum, which the engine divides by the number of targets. Without it, as
        # for custom data sets, the loss stays the mean that the script returns.
        if self._count_batch:
            self.count_targets = lambda batch: batch.targets  # type: ignore[method-assign]
        return datasets, []

    def batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer | None) -> Any:
        """Return `data`, together with its number of target tokens if the script uses this project's data sets."""
        if self._count_batch is None:
            return data
        # Ranks that read no data get the number from the rank that does.
        num_targets = None
        if data is not None:
            num_targets = {"targets": self._count_batch(data, config)}
        broadcast = mpu.broadcast_data(["targets"], num_targets, torch.int64, sizes={"targets": ()})
        return _CountedBatch(data, broadcast["targets"].double())

    checked_batch = batch

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss summed over target tokens if `batch` has their number, else the mean loss of the script."""
        if not isinstance(batch, _CountedBatch):
            return super().loss(model, batch)
        return super().loss(model, batch.data) * batch.targets.float()


def _target_counter(dataset: Any) -> Callable[[Batch, Config], Tensor] | None:
    """Return a function that counts the target tokens of a micro-batch, as an int64 scalar.

    Returns None if `dataset` is a custom data set.
    """
    if isinstance(dataset, T5Samples):
        return _t5_targets
    # A blend of several corpora has one data set for each.
    members = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return _gpt2_targets if all(isinstance(member, GPT2Dataset) for member in members) else None


def _gpt2_targets(data: Batch, config: Config) -> Tensor:
    # The script computes the same mask from its batch, and the loss is the mean over the tokens that this mask selects.
    tokens = data["text"][:, :-1]  # [b, s]: the last token is only a label
    _, loss_mask, _ = get_ltor_documents_and_position_ids(
        tokens,
        get_tokenizer().eod,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    return loss_mask.sum(dtype=torch.int64)


def _t5_targets(data: Batch, config: Config) -> Tensor:
    tokenizer: Any = get_tokenizer()
    is_target: Tensor = (data["targets"] != tokenizer.eod) & (data["labels"] != tokenizer.pad)
    return is_target.sum()

"""Training task of GPT-2: next-token prediction. Tasks of other families share its base class and its broadcast."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu

from ..config import Config
from ..config.data import DataConfig
from ..config.defaults import DEFAULTS
from ..data.corpus_paths import prefixes_of
from ..data.gpt2_dataset import build_train_valid_test_datasets
from ..model.gpt2 import GPT2Model
from ..model.loss import Targets, extra_targets, targets_of
from ..tokenizer import Tokenizer
from ..training.task import Batch, Datasets, Task
from ..utils import get_ltor_documents_and_position_ids


@lru_cache(4)  # every micro-batch asks for the number, and parsing the flags takes time
def _count_corpora(data: DataConfig) -> int:
    """Return the number of corpora that flags name, 0 if none does."""
    return len(prefixes_of(data.paths)) if data.names_corpora else 0


def broadcast_batch(
    data: Batch | None, keys: Sequence[str], config: Config, sizes: Mapping[str, Sequence[int]] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two dicts on all ranks: the tensors `keys` of a batch, int64 [b, ...], and further tensors for `Targets`.

    data: the batch on the first model-parallel rank, ignored on the others. sizes: shape of each tensor, if known.
    With several corpora, the further tensors are {"corpora": float [b, c], 1 at the corpus of each sample}; else {}.
    """
    num_corpora = _count_corpora(config.data)
    if num_corpora > 1:
        from .by_corpus import broadcast_with_corpora

        return broadcast_with_corpora(data, keys, num_corpora, config.train.batch_size, sizes)
    return mpu.broadcast_data(keys, data, torch.int64, sizes=sizes), {}


class LanguageTask(Task):
    """Base class of tasks whose model computes the loss, because it may compute the logits in chunks."""

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """Return the loss summed over the targets of a micro-batch, a scalar. The model is one without a pipeline."""
        inputs, targets = batch
        total: Tensor = model(*inputs, labels=targets[0], loss_mask=targets[1], **extra_targets(targets))
        return total


class GPT2(LanguageTask):
    """Training task of a decoder that reads windows of --seq-length tokens."""

    name = "gpt2"
    defaults = DEFAULTS["gpt2"]
    reads_alone = True
    shares_out_tokens = True

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Return ((training, validation, test) datasets, notes to print).

        A sample is {"text": [s + 1]}, with --objective prefix-lm also {"prefixes": [s]}. With --objective sft, a sample
        has the keys tokens, labels, loss_mask and document_ids, each [s].
        """
        if config.objective == "sft":
            from . import sft

            return sft.datasets(config, tokenizer)
        data = config.data
        fim: Any = None  # settings of fill-in-the-middle; None without --fim-rate
        prefixes: Any = None  # settings of prefix-LM
        if data.fim_rate:
            from .fill_in_the_middle import fill_in_the_middle

            fim = fill_in_the_middle(config, tokenizer)
        if config.objective == "prefix-lm":
            from ..data.prefixes import Prefixes

            prefixes = Prefixes(tokenizer.eod, data.reset_attention_mask)
        return build_train_valid_test_datasets(
            data.paths, data.split, data.seq_length, config.train.seed, tokenizer.vocab_size, fim, prefixes
        )

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        """Return the whole model, or with pipeline parallelism this rank's stage of the model."""
        if config.parallel.pipe_parallel_size == 0:
            return GPT2Model(config)
        from ..model.pipe import GPT2ModelPipe  # imported here: it imports DeepSpeed, which data tools do not need

        return GPT2ModelPipe(config)  # type: ignore[no-any-return]

    def batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], Targets]:
        """Return ((tokens, positions, document ids), (labels, loss mask)), each [b, s].

        The second tuple also has a dict of further tensors, see `Targets` in megatron/model/loss.py.
        data: batch of samples with the keys that `datasets` describes, or None on ranks that read no data.

        With c context-parallel ranks, tokens, labels and loss mask are this rank's shard, [b, s/c]. Positions and
        document ids cover the whole sequence on every rank.
        """
        if config.objective == "sft":
            from . import sft

            inputs, targets = sft.batch(data, config)
        else:
            assert tokenizer is not None, "batches of GPT-2 need the tokenizer's end-of-document id"
            inputs, targets = self._lm_batch(data, config, tokenizer)
        tokens, positions, document_ids = inputs
        context = mpu.context_axis()
        tokens = mpu.shard_sequence(tokens, 1, context)  # along dimension 1: [b, s] -> [b, s/c]
        labels = mpu.shard_sequence(targets[0], 1, context)
        loss_mask = mpu.shard_sequence(targets[1], 1, context)
        return (tokens, positions, document_ids), targets_of(labels, loss_mask, extra_targets(targets))

    def _lm_batch(self, data: Batch | None, config: Config, tokenizer: Tokenizer) -> tuple[tuple[Tensor, ...], Targets]:
        """Return the result of `batch` for windows of the corpus, for the whole sequence on every rank."""
        settings = config.data
        b = config.train.batch_size
        s = settings.seq_length
        sizes = {"text": (b, s + 1)}  # shape of each tensor of a batch
        if config.objective == "prefix-lm":
            sizes["prefixes"] = (b, s)
        tensors, extra = broadcast_batch(data, list(sizes), config, sizes)  # extra: further tensors for `Targets`
        text = tensors["text"]
        tokens = text[:, :-1].contiguous()  # each token but the last; its label is the next token
        labels = text[:, 1:].contiguous()
        document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(
            tokens, tokenizer.eod, settings.reset_position_ids, settings.reset_attention_mask, settings.eod_mask_loss
        )
        if "prefixes" in tensors:  # tokens of a prefix attend in both directions and are no targets
            from .prefix import mark_prefixes

            document_ids, loss_mask = mark_prefixes(tensors["prefixes"], document_ids, loss_mask)
        return (tokens, position_ids, document_ids), targets_of(labels, loss_mask, extra)

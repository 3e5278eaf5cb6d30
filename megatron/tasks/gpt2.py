"""Training tasks of the decoder models GPT-2 and Llama: next-token prediction."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu

from ..config import Config
from ..config.defaults import DEFAULTS
from ..data.fim import FillInTheMiddle
from ..data.gpt2_dataset import build_train_valid_test_datasets
from ..data.prefixes import Prefixes
from ..model.gpt2 import GPT2Model
from ..model.loss import Targets, targets_of
from ..tokenizer import Tokenizer
from ..training.task import Batch, Datasets, Task
from ..utils import get_ltor_documents_and_position_ids
from . import by_corpus, sft
from .prefix import with_prefixes


class GPT2(Task):
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
            return sft.datasets(config, tokenizer)
        data = config.data
        return build_train_valid_test_datasets(
            data.paths,
            data.split,
            data.seq_length,
            config.train.seed,
            tokenizer.vocab_size,
            fill_in_the_middle(config, tokenizer),
            Prefixes(tokenizer.eod, data.reset_attention_mask) if config.objective == "prefix-lm" else None,
        )

    def model(self, config: Config, tokenizer: Tokenizer | None) -> nn.Module:
        """Return the whole model, or with pipeline parallelism this rank's stage of the model."""
        if config.parallel.pipe_parallel_size == 0:
            return GPT2Model(config)
        from ..model.pipe import GPT2ModelPipe  # imported here: it imports DeepSpeed, which data tools do not need

        model: nn.Module = GPT2ModelPipe(config)
        return model

    def batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], Targets]:
        """Return ((tokens, positions, document ids), (labels, loss mask)), each [b, s].

        The second tuple also has a dict of further tensors, see `Targets` in megatron/model/loss.py.
        data: batch of samples with the keys that `datasets` describes, or None on ranks that read no data.

        With c context-parallel ranks, tokens, labels and loss mask are this rank's shard, [b, s/c]. Positions and
        document ids cover the whole sequence on every rank.
        """
        data = by_corpus.with_numbers(data, config, config.train.batch_size)
        (tokens, *positions), (labels, loss_mask, *others) = self._whole_batch(data, config, tokenizer)
        tokens, labels, loss_mask = (mpu.own_tokens(x, 1, mpu.context_axis()) for x in (tokens, labels, loss_mask))
        return (tokens, *positions), targets_of(labels, loss_mask, others[0] if others else {})

    def _whole_batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], Targets]:
        if config.objective == "sft":
            return sft.batch(data, config)
        assert tokenizer is not None, "batches of GPT-2 need the tokenizer's end-of-document id"
        size = config.train.batch_size, config.data.seq_length + 1
        sizes: dict[str, tuple[int, ...]] = {"text": size, **{key: size[:1] for key in by_corpus.keys(config)}}
        if config.objective == "prefix-lm":
            sizes["prefixes"] = size[0], size[1] - 1
        found = mpu.broadcast_data(list(sizes), data, torch.int64, sizes=sizes)
        text = found["text"]
        tokens = text[:, :-1].contiguous()
        labels = text[:, 1:].contiguous()
        document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(
            tokens,
            tokenizer.eod,
            config.data.reset_position_ids,
            config.data.reset_attention_mask,
            config.data.eod_mask_loss,
        )
        if "prefixes" in found:
            document_ids, loss_mask = with_prefixes(found["prefixes"], document_ids, loss_mask)
        inputs = tokens, position_ids, document_ids
        return inputs, targets_of(labels, loss_mask, by_corpus.corpora_of(found, config))

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """Return the summed loss, a scalar.

        The model computes the loss because it may compute the logits in chunks.
        """
        inputs, (labels, loss_mask, *others) = batch
        total: Tensor = model(*inputs, labels=labels, loss_mask=loss_mask, **(others[0] if others else {}))
        return total


class Llama(GPT2):
    """GPT-2's task with the common default settings of Llama, Qwen and Mistral models.

    The presets in configs/models add the settings of a single model.
    """

    name = "llama"
    defaults = DEFAULTS["llama"]


def fill_in_the_middle(config: Config, tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """Return the fill-in-the-middle settings, or None without --fim-rate.

    Raises ValueError if the tokenizer lacks one of the --fim-tokens.
    """
    data = config.data
    if not data.fim_rate:
        return None
    names = data.fim_tokens or ()
    missing = [name for name in names if name not in tokenizer.marks]
    if missing:
        raise ValueError(
            f"--fim-tokens: {data.vocab_file} has no special token {' or '.join(missing)}, only "
            f"{', '.join(tokenizer.marks)}; train a tokenizer with tools/train_tokenizer.py --special-tokens, or add "
            f"the tokens to a Hugging Face tokenizer with add_special_tokens() and save_pretrained()"
        )
    prefix, middle, suffix = (tokenizer.marks[name] for name in names)
    return FillInTheMiddle(data.fim_rate, data.fim_spm_rate, prefix, middle, suffix, tokenizer.eod)

"""Tasks of decoders, GPT-2 and Llama: predict the next token of running text."""

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
from ..tokenizer import Tokenizer
from ..training.task import Batch, Datasets, Task
from ..utils import get_ltor_documents_and_position_ids
from . import sft
from .prefix import with_prefixes


class GPT2(Task):
    """Task of a decoder that reads windows of --seq-length tokens."""

    name = "gpt2"
    defaults = DEFAULTS["gpt2"]
    reads_alone = True
    shares_out_tokens = True

    def datasets(self, config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
        """Return the datasets, and notes to print.

        A sample is {"text": [s + 1]}; for --objective sft it has tokens, labels, loss_mask and document_ids, [s] each.
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
        """Return the whole model, or this rank's pipeline stage of it."""
        if config.parallel.pipe_parallel_size == 0:
            return GPT2Model(config)
        from ..model.pipe import GPT2ModelPipe  # imports DeepSpeed, which tools that only read data do not need

        model: nn.Module = GPT2ModelPipe(config)
        return model

    def batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Return (tokens, positions, document ids), (labels, loss mask), each [b, s].

        data: a batch of samples, {"text": [b, s + 1]} or for --objective sft the fields that `datasets` describes.

        Each of c context-parallel ranks takes its own tokens, labels and loss mask, [b, s/c]. Positions and
        document ids cover the whole sequence on every rank.
        """
        (tokens, *others), (labels, loss_mask) = self._whole_batch(data, config, tokenizer)
        tokens, labels, loss_mask = (mpu.own_tokens(x, 1, mpu.context_axis()) for x in (tokens, labels, loss_mask))
        return (tokens, *others), (labels, loss_mask)

    def _whole_batch(
        self, data: Batch | None, config: Config, tokenizer: Tokenizer | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        if config.objective == "sft":
            return sft.batch(data, config)
        assert tokenizer is not None, "batches of GPT-2 need the tokenizer's end-of-document id"
        size = config.train.batch_size, config.data.seq_length + 1
        sizes = {"text": size}
        if config.objective == "prefix-lm":
            sizes["prefixes"] = size[0], size[1] - 1
        found = mpu.broadcast_data(list(sizes), data, torch.int64, sizes=sizes)
        text = found["text"]
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(
            tokens,
            tokenizer.eod,
            config.data.reset_position_ids,
            config.data.reset_attention_mask,
            config.data.eod_mask_loss,
        )
        if "prefixes" in found:
            document_ids, loss_mask = with_prefixes(found["prefixes"], document_ids, loss_mask)
        return (tokens, position_ids, document_ids), (labels, loss_mask)

    def loss(self, model: Any, batch: tuple[Any, Any]) -> Tensor:
        """Return the summed loss, a scalar. The model computes the loss, so that it can compute logits in chunks."""
        inputs, (labels, loss_mask) = batch
        total: Tensor = model(*inputs, labels=labels, loss_mask=loss_mask)
        return total


class Llama(GPT2):
    """GPT-2's task with the usual defaults of a Llama, Qwen or Mistral; the presets in configs/models complete them."""

    name = "llama"
    defaults = DEFAULTS["llama"]


def fill_in_the_middle(config: Config, tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """Return the fill-in-the-middle settings, or None without --fim-rate.

    Raises ValueError for a special token that the tokenizer lacks.
    """
    data = config.data
    if not data.fim_rate:
        return None
    names = data.fim_tokens or ()
    missing = [name for name in names if name not in tokenizer.marks]
    if missing:
        raise ValueError(
            f"--fim-tokens: {data.vocab_file} has no special token {' or '.join(missing)}, only "
            f"{', '.join(tokenizer.marks)}; train a tokenizer by tools/train_tokenizer.py --special-tokens, or add the "
            f"tokens to a Hugging Face tokenizer by add_special_tokens() and save_pretrained()"
        )
    prefix, middle, suffix = (tokenizer.marks[name] for name in names)
    return FillInTheMiddle(data.fim_rate, data.fim_spm_rate, prefix, middle, suffix, tokenizer.eod)

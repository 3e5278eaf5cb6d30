"""Supervised fine-tuning of a decoder on windows that pack whole records, such as conversations.

Tokens attend only to tokens of their own record. Positions start at 0 in each record.
"""

from torch import Tensor

from megatron import mpu

from ..config import Config
from ..data.sft_dataset import build_train_valid_test_datasets
from ..model.loss import Targets, targets_of
from ..model.masks import positions_in_documents
from ..model.text_tokens import count_text_tokens
from ..tokenizer import Tokenizer
from ..training.task import Batch, Datasets
from .gpt2 import broadcast_batch

KEYS = ("tokens", "labels", "loss_mask", "document_ids")


def datasets(config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
    """Return ((training, validation, test) datasets, notes to print).

    A sample has the keys tokens, labels, loss_mask and document_ids, each [s].
    """
    data = config.data
    seed = config.train.seed
    return build_train_valid_test_datasets(
        data.paths, data.split, data.seq_length, tokenizer.eod, seed, tokenizer.vocab_size
    )


def batch(data: Batch | None, config: Config) -> tuple[tuple[Tensor, ...], Targets]:
    """Return ((tokens, positions, document ids), (labels, loss mask)), each [b, s], from a batch of samples.

    The second tuple also has a dict of further tensors, see `Targets` in megatron/model/loss.py.
    --reset-position-ids and --reset-attention-mask have no effect here: records are always separate documents.
    """
    shape = config.train.batch_size, config.data.seq_length
    tensors, extra = broadcast_batch(data, KEYS, config, dict.fromkeys(KEYS, shape))
    tokens = tensors["tokens"]
    document_ids = tensors["document_ids"]
    inputs = (tokens, positions_in_documents(document_ids), document_ids.int())
    if config.model.num_experts is not None:  # the loss of their routers is a mean over all text, not over targets
        extra["text"] = count_text_tokens(tokens, document_ids, mpu.context_axis())
    loss_mask = tensors["loss_mask"].float()
    return inputs, targets_of(tensors["labels"], loss_mask, extra)

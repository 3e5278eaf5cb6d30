"""Supervised fine-tuning of a decoder: windows of whole records, each of which sees only itself and counts its positions from 0."""

import torch
from torch import Tensor

from megatron import mpu

from ..config import Config
from ..data.sft_dataset import build_train_valid_test_datasets
from ..model.masks import positions_in_documents
from ..tokenizer import Tokenizer
from ..training.task import Batch, Datasets

KEYS = ("tokens", "labels", "loss_mask", "document_ids")


def datasets(config: Config, tokenizer: Tokenizer) -> tuple[Datasets, list[str]]:
    """A sample is what `KEYS` names, [s] each."""
    data, seed = config.data, config.train.seed
    return build_train_valid_test_datasets(
        data.paths, data.split, data.seq_length, tokenizer.eod, seed, tokenizer.vocab_size
    )


def batch(data: Batch | None, config: Config) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """data -> (tokens, positions, document ids), (labels, loss mask), each [b, s]; --reset-* or not, records are apart."""
    size = config.train.batch_size, config.data.seq_length
    found = mpu.broadcast_data(KEYS, data, torch.int64, sizes=dict.fromkeys(KEYS, size))
    positions = positions_in_documents(found["document_ids"])
    inputs = found["tokens"], positions, found["document_ids"].int()
    return inputs, (found["labels"], found["loss_mask"].float())

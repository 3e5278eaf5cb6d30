"""GPT-2 written in the style of CPM-Pretrain's tutorial, for tests of `pretrain()`."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron import get_args, get_tokenizer, mpu
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.model import GPT2Model, GPT2ModelPipe
from megatron.utils import get_ltor_documents_and_position_ids


def train_valid_test_datasets_provider() -> Any:
    args = get_args()
    return build_train_valid_test_datasets(
        args.config.data.paths, args.split, args.seq_length, args.seed, get_tokenizer().vocab_size
    )[0]


def get_batch_pipe(data: Any) -> Any:
    args = get_args()
    text = mpu.broadcast_data(["text"], data, torch.int64)["text"]  # [b, s + 1]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(
        tokens, get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    )
    return (tokens, position_ids, document_ids), (labels, loss_mask)


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Tensor]:
    inputs, (labels, loss_mask) = get_batch_pipe(next(data_iterator) if data_iterator is not None else None)
    return (model(*inputs, labels=labels) * loss_mask).sum(), loss_mask.sum()


def count_targets(data: Any) -> Tensor:
    return get_batch_pipe(data)[1][1].sum(dtype=torch.float64)


def model_provider() -> nn.Module:
    args = get_args()
    if args.pipe_parallel_size == 0:
        return GPT2Model(args.config)
    model: Any = GPT2ModelPipe(args.config)
    model._megatron_batch_fn = get_batch_pipe
    return model  # type: ignore[no-any-return]

"""Pretrain GPT-2. `bash scripts/run_gpt2.sh` calls this; `python pretrain_gpt2.py --help` lists every setting."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron import get_args, get_tokenizer, mpu, print_rank_0
from megatron.data.gpt2_dataset import AnyDataset, build_train_valid_test_datasets
from megatron.model import GPT2Model
from megatron.training import pretrain
from megatron.utils import get_ltor_documents_and_position_ids

Batch = dict[str, Tensor]
DEFAULTS = {"family": "gpt2"}


def train_valid_test_datasets_provider() -> tuple[AnyDataset, AnyDataset, AnyDataset]:
    """The three parts of the corpus."""
    args = get_args()
    datasets, notes = build_train_valid_test_datasets(
        args.config.data.paths, args.split, args.seq_length, args.seed, get_tokenizer().vocab_size
    )
    for note in notes:
        print_rank_0(f"note: {note}")
    return datasets


def get_batch_pipe(data: Batch | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """A micro-batch as a pipeline wants it: (inputs of the first stage, what the loss needs on the last).

    data is read by the first rank of a model-parallel group and None on the others.
    """
    args = get_args()
    text = mpu.broadcast_data(["text"], data, torch.int64)["text"]  # [b, s + 1]
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    document_ids, loss_mask, position_ids = get_ltor_documents_and_position_ids(
        tokens, get_tokenizer().eod, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
    )
    return (tokens, position_ids, document_ids), (labels, loss_mask)


def get_batch(data_iterator: Iterator[Batch] | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The next micro-batch: tokens, labels, loss mask, document ids, position ids."""
    data = next(data_iterator) if data_iterator is not None else None
    (tokens, position_ids, document_ids), (labels, loss_mask) = get_batch_pipe(data)
    return tokens, labels, loss_mask, document_ids, position_ids


def forward_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Tensor]:
    """(sum of the loss over the target tokens, their number); used without a pipeline."""
    tokens, labels, loss_mask, document_ids, position_ids = get_batch(data_iterator)
    losses = model(tokens, position_ids, document_ids, labels=labels)  # [b, s]
    return (losses * loss_mask).sum(), loss_mask.sum()


def count_targets(data: Batch | None) -> Tensor:
    """How many tokens of a micro-batch are trained on."""
    _, (_, loss_mask) = get_batch_pipe(data)
    return loss_mask.sum(dtype=torch.float64)


def model_provider() -> nn.Module:
    """The model: whole, or this stage's part of it."""
    args = get_args()
    if args.pipe_parallel_size == 0:
        return GPT2Model(args.config)
    from megatron.model import GPT2ModelPipe

    model: nn.Module = GPT2ModelPipe(args.config)
    model._megatron_batch_fn = get_batch_pipe  # type: ignore[assignment]
    return model


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        count_targets=count_targets,
        args_defaults=DEFAULTS,
        name="gpt2",
    )

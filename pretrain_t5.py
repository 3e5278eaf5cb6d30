"""Pretrain T5. `bash scripts/run_t5.sh` calls this; `python pretrain_t5.py --help` lists every setting."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron import get_args, get_tokenizer, mpu, print_rank_0
from megatron.config import Config
from megatron.data import cpm_triples
from megatron.data.corpora import prefixes_of
from megatron.data.t5_dataset import Datasets, Objective, Specials, build_train_valid_test_datasets
from megatron.model import T5Model
from megatron.model.masks import no_documents
from megatron.tokenizer import SentinelTokenizer, Tokenizer
from megatron.training import pretrain

Batch = dict[str, Tensor]
KEYS = ["encoder", "decoder", "labels", "encoder_documents", "decoder_documents", "loss_mask"]
DEFAULTS = {"family": "t5", "enc_seq_length": 512}


def tokenizer_provider(config: Config, tokenizer: Tokenizer) -> SentinelTokenizer:
    """Padding and sentinels behind the tokens of the text."""
    return SentinelTokenizer(tokenizer, config.data.num_sentinels, config.data.span_convention)


def datasets_of(config: Config, tokenizer: SentinelTokenizer) -> tuple[Datasets, list[str]]:
    """The three parts of the corpus, and notes on them."""
    data, seed = config.data, config.train.seed
    lengths = data.enc_seq_length or data.seq_length, data.dec_seq_length
    specials = Specials(tokenizer.eod, tokenizer.pad, tokenizer.sentinels)
    if all(map(cpm_triples.is_triple, prefixes_of(data.paths))):
        return cpm_triples.build_train_valid_test_datasets(
            data.paths, data.split, *lengths, specials, seed, tokenizer.base.vocab_size
        )
    objective = Objective(data.objective, data.span_convention, data.noise_density, data.mean_span_length)
    return build_train_valid_test_datasets(
        data.paths, data.split, objective, *lengths, specials, seed, tokenizer.base.vocab_size
    )


def train_valid_test_datasets_provider() -> Datasets:
    """The three parts of the corpus."""
    datasets, notes = datasets_of(get_args().config, cast(SentinelTokenizer, get_tokenizer()))
    for note in notes:
        print_rank_0(f"note: {note}")
    return datasets


def get_batch_pipe(data: Batch | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """A micro-batch as a pipeline wants it: (inputs of the first stage, what the loss needs on the last).

    data is read by the first rank of a model-parallel group and None on the others. Masks are not
    made here: where documents or padding are to be kept apart, their numbers go along. What follows
    the last token of a decoder is seen by none and needs no number (1 stands for it). A label that does
    not count becomes padding.
    """
    args = get_args()
    batch = mpu.broadcast_data(KEYS, data, torch.int64)
    pad = cast(SentinelTokenizer, get_tokenizer()).pad
    fillers = {"encoder": pad, "decoder": pad, "labels": pad, "decoder_documents": 1}
    batch = {key: mpu.pad_sequence(each, fillers.get(key, 0)) for key, each in batch.items()}
    labels, loss_mask = batch["labels"], batch["loss_mask"].float()
    if args.eod_mask_loss:
        loss_mask = loss_mask.masked_fill(labels == get_tokenizer().eod, 0.0)
    labels = labels.masked_fill(loss_mask == 0, pad)
    theirs, ours = batch["encoder_documents"].short(), batch["decoder_documents"].short()
    if not args.reset_attention_mask:
        # One document, and padding where there is any. It is rare: without it no ids need to travel.
        theirs, ours = theirs.clamp(max=1), ours.clamp(max=1)
        if bool(theirs.all()) and bool(ours.all()):
            theirs = ours = no_documents(labels.device)
    return (batch["encoder"], batch["decoder"].int(), theirs, ours), (labels, loss_mask)


def get_batch(data_iterator: Iterator[Batch] | None) -> tuple[Tensor, ...]:
    """The next micro-batch: encoder tokens, decoder tokens, document ids of both, labels, loss mask."""
    data = next(data_iterator) if data_iterator is not None else None
    inputs, targets = get_batch_pipe(data)
    return *inputs, *targets


def forward_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Tensor]:
    """(sum of the loss over the target tokens, their number); used without a pipeline."""
    *inputs, labels, loss_mask = get_batch(data_iterator)
    losses = model(*inputs, labels=labels)  # [b, q]
    return (losses * loss_mask).sum(), loss_mask.sum()


def count_targets(data: Batch | None) -> Tensor:
    """How many tokens of a micro-batch are trained on."""
    _, (_, loss_mask) = get_batch_pipe(data)
    return loss_mask.sum(dtype=torch.float64)


def is_text(tokenizer: SentinelTokenizer, labels: Tensor) -> Tensor:
    """Which labels are masked text: neither sentinels nor ends nor padding."""
    marks = torch.tensor([tokenizer.pad, tokenizer.eod, *tokenizer.sentinels], device=labels.device)
    return ~torch.isin(labels, marks)


def model_provider() -> nn.Module:
    """The model: whole, or this stage's part of it."""
    args = get_args()
    looks = partial(is_text, cast(SentinelTokenizer, get_tokenizer()))
    if args.pipe_parallel_size == 0:
        return T5Model(args.config, is_text=looks)
    from megatron.model import T5ModelPipe

    model: nn.Module = T5ModelPipe(args.config, looks)
    model._megatron_batch_fn = get_batch_pipe  # type: ignore[assignment]
    return model


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        forward_step,
        count_targets=count_targets,
        tokenizer_provider=tokenizer_provider,
        args_defaults=DEFAULTS,
        name="t5",
    )

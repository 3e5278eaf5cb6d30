"""GPT-2 training in one of several layouts, and in plain torch for comparison."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config, ModelConfig, TrainConfig
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.model import GPT2Model, global_parameters
from megatron.tokenizer import load_tokenizer
from tests.parity import muon_reference, reference
from tests.support import losses, train_gpt2

LAYERS, HIDDEN, HEADS, SEQ, GLOBAL_BATCH, STEPS, SEED = 4, 32, 4, 24, 8, 5, 7
LEARNS = 8  # after so many steps, the loss of plain torch has fallen by more than 0.3
PER_DOCUMENT = ("--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask")


class Layout(NamedTuple):
    """Pipeline, data-, tensor- and context-parallel sizes of a layout, its ZeRO stage and pipeline schedule.

    pp 0 means no pipeline.
    """

    pp: int
    dp: int
    tp: int
    zero: int = 0
    cp: int = 1
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return max(self.pp, 1) * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        more = (f"-cp{self.cp}" if self.cp > 1 else "") + (f"-zero{self.zero}" if self.zero else "")
        more += f"-{self.schedule}" if self.schedule != "1f1b" else ""
        return f"pp{self.pp}-dp{self.dp}-tp{self.tp}{more}"


LAYOUTS = [
    Layout(1, 1, 1),
    Layout(1, 2, 1),
    Layout(1, 1, 2),
    Layout(2, 1, 1),
    Layout(2, 1, 2),
    Layout(2, 2, 1),
    Layout(1, 2, 2),
    Layout(2, 2, 2),
    Layout(2, 1, 1, schedule="zb-h1"),
    Layout(0, 2, 1, zero=1),
    Layout(0, 2, 1, zero=2),
    Layout(0, 2, 1, zero=3),
]
LR = {"sgd": 0.1, "adam": 1e-3, "muon": 3e-3}


def ours(
    layout: Layout,
    run_dir: Path,
    data: str,
    vocab_file: str,
    *more: str,
    optimizer: str = "sgd",
    precision: str = "fp32",
    by_document: bool = False,
    steps: int = STEPS,
) -> list[float]:
    """Train in `layout` with the function that pretrain_gpt2.py calls; return the losses.

    more: further flags. by_document: pass --eod-mask-loss, --reset-position-ids and --reset-attention-mask, to separate
    the documents.
    """
    flags = {
        "--data-path": data,
        "--vocab-file": vocab_file,
        "--split": "1",
        "--num-layers": LAYERS,
        "--hidden-size": HIDDEN,
        "--num-attention-heads": HEADS,
        "--seq-length": SEQ,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--batch-size": 2,
        "--gas": GLOBAL_BATCH // 2 // layout.dp,
        "--train-iters": steps,
        "--lr": LR[optimizer],
        "--lr-decay-style": "constant",
        "--warmup": 0,
        "--optimizer": optimizer,
        "--seed": SEED,
        "--precision": precision,
        "--log-interval": 1,
        "--eval-iters": 0,
        "--save-interval": 0,
        "--pipe-parallel-size": layout.pp,
        "--model-parallel-size": layout.tp,
        "--context-parallel-size": layout.cp,
        "--zero-stage": layout.zero,
        "--make-vocab-size-divisible-by": 64,
        "--partition-method": "type:Block",
        "--pipeline-schedule": layout.schedule,
    }
    argv = [str(part) for pair in flags.items() for part in pair]
    argv += [] if "--ema-decay" in more else ["--no-save-at-end"]  # only averages are read from a checkpoint
    rows = train_gpt2(layout.world, run_dir, *argv, "--no-tensorboard", *(PER_DOCUMENT if by_document else ()), *more)
    return losses(rows)


def initial_weights(vocab_size: int, **mup: int) -> dict[str, Tensor]:
    config = Config(
        model=ModelConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, vocab_size=vocab_size,
            max_position_embeddings=SEQ, make_vocab_size_divisible_by=1, **mup,
        ),
        train=TrainConfig(seed=SEED),
        data=type(Config().data)(seq_length=SEQ),
    )  # fmt: skip
    return {name: p.detach().clone() for name, p in global_parameters(GPT2Model(config))}


@cache
def plain(
    data: str,
    vocab_file: str,
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float32,
    by_document: bool = False,
    z_loss: float = 0.0,
    steps: int = STEPS,
    multiply: reference.Multiply = reference.plain_product,
    settings: Callable[[str], reference.Settings] = reference.default_settings,
    scales: reference.Scales | None = None,
    rejects: Callable[[float, float], bool] = reference.rejects_nothing,
    watch: Callable[[reference.Weights], None] | None = None,
    **mup: int,
) -> list[float]:
    """Train in one process of plain torch, with the data and settings of `ours`; return the losses.

    settings, rejects, watch: see `reference.learn`. mup: muP's settings of the initial weights.
    """
    model = ModelConfig(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS)
    tokenizer = load_tokenizer(vocab_file)
    (train, _, _), _ = build_train_valid_test_datasets(data, "1", SEQ, SEED)
    assert train is not None
    batches = [
        np.stack([train[n]["text"].numpy() for n in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)])
        for step in range(steps)
    ]
    return reference.train(
        initial_weights(tokenizer.vocab_size, **mup),
        batches,
        layers=LAYERS,
        heads=HEADS,
        eod=tokenizer.eod,
        by_document=by_document,
        lr=LR[optimizer],
        optimizer=optimizer,
        clip=1.0,
        dtype=dtype,
        z_loss=z_loss,
        multiply=multiply,
        scales=scales,
        learn=partial(muon_reference.learn, model=model)
        if optimizer == "muon"
        else partial(reference.learn, settings=settings, rejects=rejects, watch=watch),
    )

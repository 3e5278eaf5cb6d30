"""Training of Llama, Qwen and Mistral in any layout, and of Hugging Face's models in one process as a reference."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from megatron import mpu
from megatron.config import Config
from megatron.config.command_line import parse, with_values
from megatron.data.gpt2_dataset import build_train_valid_test_datasets
from megatron.model import GPT2Model, global_parameters
from megatron.tasks import Llama
from megatron.tokenizer import load_tokenizer
from megatron.training import start_engine
from tests.conformance.engines import remembered_groups
from tests.llama_twins import Sizes, exact, flags_of, load_ours, theirs
from tests.support import on_ranks

from .reference import masks

GLOBAL_BATCH, STEPS, SEQ, SEED, RATE, CLIP = 8, 4, 24, 7, 1.0, 0.2  # CLIP is so low that every step is clipped
LAYERS = 8  # layers that a pipeline distributes: 4 transformer blocks and 4 layers before and after the blocks
BLOCKS = 4
COMMON = (
    f"--seq-length {SEQ} --batch-size 2 --train-iters {STEPS} --lr {RATE} --optimizer sgd --lr-decay-style constant "
    "--warmup 0 "
    f"--seed {SEED} --make-vocab-size-divisible-by 64 --clip-grad {CLIP} --partition-method type:Block "
    "--init-method-std 0.1"
)
DOCUMENTS = "--eod-mask-loss --reset-position-ids --reset-attention-mask"


class Kind(NamedTuple):
    """A kind of model: prefix of Hugging Face's class names (such as Qwen2), sizes, and this project's flags."""

    name: str
    sizes: Sizes
    tied: bool = False
    window: int | None = None
    flags: str = ""


KINDS = {
    "llama": Kind("Llama", Sizes(BLOCKS, 16, 4, 2, 6, 20)),
    "qwen2": Kind("Qwen2", Sizes(BLOCKS, 16, 4, 4, 4, 20), flags="--reset-position-ids"),
    "qwen3": Kind("Qwen3", Sizes(BLOCKS, 16, 4, 1, 8, 20), tied=True),
    "mistral": Kind("Mistral", Sizes(BLOCKS, 16, 4, 2, 4, 20), window=7, flags=DOCUMENTS),
}


class Way(NamedTuple):
    """One training run: kind of model, further flags, and precision."""

    kind: str
    flags: str = ""
    precision: str = "fp32"


def _config(way: Way, vocab_file: str, more: str = "") -> Config:
    kind = KINDS[way.kind]
    flags = (
        f"{flags_of(kind.name, kind.sizes, kind.tied, kind.window)} {COMMON} {kind.flags} --precision "
        f"{way.precision} {way.flags}"
    )
    return with_values(parse([*flags.split(), *more.split()]), {"vocab_size": load_tokenizer(vocab_file).vocab_size})


def _samples(data: str) -> Any:
    (dataset, _, _), _ = build_train_valid_test_datasets(data, "1", SEQ, SEED)
    assert dataset is not None
    return dataset


def _stack(dataset: Any, first: int, count: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = default_collate([dataset[n] for n in range(first, first + count)])
    return batch


def expected(way: Way, data: str, vocab_file: str, rate: float = RATE) -> list[float]:
    """Train Hugging Face's model in one process at a constant learning rate `rate`; return the losses."""
    kind, tokenizer, dataset = KINDS[way.kind], load_tokenizer(vocab_file), _samples(data)
    config = with_values(_config(way, vocab_file), {"make_vocab_size_divisible_by": 1})
    model = theirs(kind.name, kind.sizes, kind.tied, kind.window, vocab=tokenizer.vocab_size).train()
    load_ours(model, {name: p.detach() for name, p in global_parameters(GPT2Model(config))}, kind.sizes)
    model = exact(model) if way.precision == "fp64" else model
    decay, other = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}]
    steps, found = torch.optim.SGD(groups, lr=rate, momentum=0.9), []
    for step in range(STEPS):
        text = _stack(dataset, step * GLOBAL_BATCH, GLOBAL_BATCH)["text"].long()
        tokens, labels = text[:, :-1], text[:, 1:]
        loss = _loss(model, kind, tokens, labels, tokenizer.eod)
        steps.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), CLIP)
        steps.step()
        found.append(loss.item())
    return found


def _loss(model: Any, kind: Kind, tokens: Tensor, labels: Tensor, eod: int) -> Tensor:
    positions, allowed, counts = masks(tokens, eod, by_document=True)
    place = torch.arange(SEQ)
    if "--reset-attention-mask" not in kind.flags:
        allowed = (place[:, None] >= place).expand_as(allowed)
    if kind.window:
        allowed = allowed & (place[:, None] - place < kind.window)
    if "--reset-position-ids" not in kind.flags:
        positions = place.expand_as(tokens)
    if "--eod-mask-loss" not in kind.flags:
        counts = torch.ones_like(tokens)
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]
    logits = model(tokens, position_ids=positions, attention_mask=mask).logits
    nats = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (nats * counts).sum() / counts.sum()


def _train(way: Way, more: str, replicas: int, data: str, vocab_file: str) -> list[float]:
    dataset, tokenizer = _samples(data), load_tokenizer(vocab_file)
    engine = start_engine(Llama(), _config(way, vocab_file, more), tokenizer)
    mesh, share = mpu.get_mesh(), GLOBAL_BATCH // replicas
    reads = mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)

    def batches() -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            for micro in range(0, share, 2):
                yield _stack(dataset, step * GLOBAL_BATCH + mesh.share.rank * share + micro, 2)

    source: Any = batches() if reads else None
    return [engine.train_batch(source, RATE).loss.item() for _ in range(STEPS)]


def _body(grid: tuple[int, ...], ways: Sequence[Way], data: str, vocab_file: str) -> list[list[float]]:
    pp, dp, tp, *cp = grid
    more = (
        f"--context-parallel-size {math.prod(cp)} --pipe-parallel-size {pp} --model-parallel-size {tp} --gas "
        f"{GLOBAL_BATCH // 2 // dp}"
    )
    found = []
    with remembered_groups() as begin:
        for way in ways:
            begin()
            try:
                found.append(_train(way, more, dp, data, vocab_file))
            except Exception as error:
                raise RuntimeError(f"in {way}") from error
    return found


def losses(grid: tuple[int, ...], ways: Sequence[Way], data: str, vocab_file: str) -> list[list[float]]:
    """Do all training runs in one launch of ranks, check that the ranks' losses agree, and return each run's losses.

    grid: the pipeline, data, tensor-parallel and, optionally, context-parallel size.
    """
    by_rank = on_ranks(math.prod(max(size, 1) for size in grid), _body, grid, ways, data, vocab_file, timeout=500)
    assert all(each == by_rank[0] for each in by_rank)
    return by_rank[0]

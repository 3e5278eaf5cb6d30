"""Training and evaluation of T5 in any layout, and by plain torch in one process as a reference."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from megatron import mpu
from megatron.config.command_line import parse, with_values
from megatron.data.t5_dataset import Objective, Specials, T5Samples, build_train_valid_test_datasets
from megatron.engines.engine import Engine
from megatron.model import T5Model, global_parameters
from megatron.tasks import T5
from megatron.tokenizer import SentinelTokenizer, load_tokenizer
from megatron.training import start_engine
from tests.conformance.engines import remembered_groups
from tests.support import on_ranks

from .t5_reference import Shape, logits, train

GLOBAL_BATCH, STEPS, ENCODER, SEED = 8, 4, 32, 7
LAYERS = {"cpm": 12, "t5": 17, "umt5": 17}  # layers of a pipeline, of which 5 are transformer blocks
COMMON = (
    "--num-layers 2 --num-decoder-layers 3 --hidden-size 16 --num-attention-heads 4 --ff-hidden-size 24 --family t5 "
    f"--enc-seq-length {ENCODER} "
    f"--seq-length {ENCODER} --hidden-dropout 0 --attention-dropout 0 --batch-size 2 --train-iters {STEPS} --lr 0.1 "
    "--optimizer sgd "
    f"--lr-decay-style constant --warmup 0 --seed {SEED} --make-vocab-size-divisible-by 64 --clip-grad 1.0 "
    "--partition-method type:Block"
)
VARIANTS = {
    "cpm": "--span-convention cpm --reset-attention-mask",
    "t5": "--span-convention t5 --normalization rmsnorm --position-embedding relative "
    "--relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 20 --no-scale-attention --no-hidden-bias --activation gated-gelu "
    "--no-tie-embeddings "
    "--kv-hidden-size 6",
}
VARIANTS["umt5"] = f"{VARIANTS['t5']} --relative-attention-per-layer"


class Way(NamedTuple):
    """One training run: variant of T5, further flags, and precision."""

    variant: str
    flags: str = ""
    precision: str = "fp32"


def _flags(way: Way) -> list[str]:
    return f"{COMMON} {VARIANTS[way.variant]} --precision {way.precision} {way.flags}".split()


def _data(way: Way, data: str, vocab_file: str) -> tuple[T5Samples, SentinelTokenizer]:
    config = parse(_flags(way))
    tokenizer = SentinelTokenizer(load_tokenizer(vocab_file), config.data.num_sentinels, config.data.span_convention)
    objective = Objective("span-corruption", config.data.span_convention)
    specials = Specials(tokenizer.eod, tokenizer.pad, tokenizer.sentinels)
    (dataset, _, _), _ = build_train_valid_test_datasets(data, "1", objective, ENCODER, None, specials, SEED)
    assert dataset is not None
    return dataset, tokenizer


def _stack(dataset: T5Samples, first: int, count: int) -> dict[str, Tensor]:
    batch: dict[str, Tensor] = default_collate([dataset[n] for n in range(first, first + count)])
    return batch


def expected(way: Way, data: str, vocab_file: str) -> list[float]:
    """Train a T5 with plain torch in one process; return the losses."""
    dataset, tokenizer = _data(way, data, vocab_file)
    config = with_values(parse(_flags(way)), {"vocab_size": tokenizer.vocab_size, "make_vocab_size_divisible_by": 1})
    weights = {name: p.detach().clone() for name, p in global_parameters(T5Model(config))}
    batches = [_stack(dataset, step * GLOBAL_BATCH, GLOBAL_BATCH) for step in range(STEPS)]
    dtype = torch.float64 if way.precision == "fp64" else torch.float32
    return train(weights, batches, Shape(2, 3, 4, way.variant != "cpm"), way.variant == "cpm", dtype)


def _body(grid: tuple[int, int, int], ways: Sequence[Way], data: str, vocab_file: str) -> list[list[float]]:
    pp, dp, tp = grid
    found = []
    with remembered_groups() as begin:
        for way in ways:
            begin()
            grid_flags = f"--pipe-parallel-size {pp} --model-parallel-size {tp} --gas {GLOBAL_BATCH // 2 // dp}"
            try:
                found.append(_train([*_flags(way), *grid_flags.split()], way, dp, data, vocab_file))
            except Exception as error:
                raise RuntimeError(f"in {way}") from error
    return found


def _start(argv: list[str], way: Way, replicas: int, data: str, vocab_file: str) -> tuple[Engine, Any]:
    """Return (engine, iterator over this rank's micro-batches or, on a rank that reads no data, None)."""
    dataset, tokenizer = _data(way, data, vocab_file)
    config = with_values(parse(argv), {"vocab_size": tokenizer.vocab_size})
    engine = start_engine(T5(), config, tokenizer)
    mesh = mpu.get_mesh()
    reads = mesh.model.rank == 0 and mesh.pipe.rank in (0, mesh.pipe.size - 1)
    share = GLOBAL_BATCH // replicas

    def batches() -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            for micro in range(0, share, 2):
                yield _stack(dataset, step * GLOBAL_BATCH + mesh.data.rank * share + micro, 2)

    return engine, batches() if reads else None


def _train(argv: list[str], way: Way, replicas: int, data: str, vocab_file: str) -> list[float]:
    engine, source = _start(argv, way, replicas, data, vocab_file)
    return [engine.train_batch(source, 0.1).loss.item() for _ in range(STEPS)]


def _evaluate(grid: tuple[int, int, int], way: Way, data: str, vocab_file: str) -> list[dict[str, float]]:
    """Return evaluation results after a training step at learning rate 0, which must not influence them."""
    pp, dp, tp = grid
    flags = (
        f"--pipe-parallel-size {pp} --model-parallel-size {tp} --gas {GLOBAL_BATCH // 2 // dp} --init-method-std 0.3"
    )
    engine, source = _start([*_flags(way), *flags.split()], way, dp, data, vocab_file)
    engine.train_batch(source, 0.0)
    return [engine.eval_batch(source) for _ in range(STEPS - 1)]


def evaluated(grid: tuple[int, int, int], way: Way, data: str, vocab_file: str) -> list[dict[str, float]]:
    """Return `eval_batch`'s results for all global batches except the first, which a training step consumes.

    The initial weights are so large that the model's predictions differ between tokens.
    """
    pp, dp, tp = grid
    by_rank = on_ranks(max(pp, 1) * dp * tp, _evaluate, grid, way, data, vocab_file)
    assert all(each == by_rank[0] for each in by_rank)
    return by_rank[0]


def expected_evaluation(way: Way, data: str, vocab_file: str) -> list[dict[str, float]]:
    """Return the results that `evaluated` must match, computed in plain torch from complete logits."""
    dataset, tokenizer = _data(way, data, vocab_file)
    config = with_values(
        parse([*_flags(way), "--init-method-std", "0.3"]),
        {"vocab_size": tokenizer.vocab_size, "make_vocab_size_divisible_by": 1},
    )
    weights = {name: p.detach() for name, p in global_parameters(T5Model(config))}
    found = []
    for step in range(1, STEPS):
        batch = _stack(dataset, step * GLOBAL_BATCH, GLOBAL_BATCH)
        ids = [batch["encoder_document_ids"], batch["decoder_document_ids"]]
        if way.variant == "t5":
            ids = [torch.ones_like(each) for each in ids]
        out = logits(weights, batch["encoder"], batch["decoder"], *ids, Shape(2, 3, 4, way.variant != "cpm"))
        labels, counts = batch["labels"], batch["loss_mask"].bool()
        nats = -out.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        marks = torch.tensor([tokenizer.eod, tokenizer.pad, *tokenizer.sentinels])
        text = counts & ~torch.isin(labels, marks)
        found.append({
            "loss": nats[counts].sum().item(), "targets": counts.sum().item(), "text_loss": nats[text].sum().item(),
            "text_right": (out.argmax(-1) == labels)[text].sum().item(), "text_tokens": text.sum().item(),
        })  # fmt: skip
    return found


def losses(grid: tuple[int, int, int], ways: Sequence[Way], data: str, vocab_file: str) -> list[list[float]]:
    """Do all training runs in one launch of ranks, check that the ranks' losses agree, and return each run's losses.

    grid: the pipeline, data and tensor-parallel size.
    """
    pp, dp, tp = grid
    by_rank = on_ranks(max(pp, 1) * dp * tp, _body, grid, ways, data, vocab_file, timeout=500)
    assert all(each == by_rank[0] for each in by_rank)
    return by_rank[0]

"""Sparse gradients, e.g. of `nn.Embedding(sparse=True)`, train as in plain torch in pipelines, replicas and ZeRO."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tds.pipe import TiedLayerSpec
from tds.reducer import GradReducer
from tds.sparse import sparse_weights
from tests.support import covering, on_ranks

TOKENS, WIDTH, MICROS, STEPS = 12, 4, 2, 4
mse = nn.functional.mse_loss


def logits(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight.t()


def layers(tied: bool) -> list[Any]:
    torch.manual_seed(3)
    table = nn.Embedding(TOKENS, WIDTH, sparse=True)
    start = table.weight.detach().clone()

    class Table(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(TOKENS, WIDTH, sparse=True)
            self.weight.data.copy_(start)

    if tied:
        return [TiedLayerSpec("t", Table), nn.Linear(WIDTH, WIDTH), TiedLayerSpec("t", Table, forward_fn=logits)]
    return [Table(), nn.Linear(WIDTH, WIDTH)]


def batches(step: int, replica: int, tied: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches in which tokens repeat; replicas share some token ids, and others occur on one replica only."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    for _ in range(MICROS):
        tokens = torch.randint(TOKENS // 2, (3,), generator=generator) + 2 * replica
        yield tokens.repeat(2), torch.randn(6, TOKENS if tied else WIDTH, generator=generator)


def optimizers(kind: str, weights: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    if kind == "sparse adam":
        rows = [p for p in weights if p.shape[0] == TOKENS]
        rest = [p for p in weights if p.shape[0] != TOKENS]
        found: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(rows, lr=0.05)] if rows else []
        return found + ([torch.optim.SGD(rest, lr=0.5)] if rest else [])
    if kind == "adam":
        return [torch.optim.AdamW(weights, lr=0.05)]
    return [torch.optim.SGD(weights, lr=0.5, momentum=0.9 if kind == "momentum" else 0.0)]


def plain(kind: str, tied: bool, replicas: int, clip: float) -> tuple[list[float], Tensor]:
    """Train in plain torch; return the losses and the final embedding table.

    Adam gets dense gradients, since torch's Adam accepts no sparse ones.
    """
    table, linear, *_ = layers(tied)
    if tied:
        table = table.build()
    table.sparse = kind != "adam"
    weights = [*table.parameters(), *linear.parameters()]
    found = []
    every = optimizers(kind, weights)
    for step in range(STEPS):
        losses = [
            mse(logits(table, linear(table(x))) if tied else linear(table(x)), y)
            for replica in range(replicas)
            for x, y in batches(step, replica, tied)
        ]
        loss = torch.stack(losses).mean()
        for p in weights:
            p.grad = None
        torch.autograd.backward(loss)
        if clip:
            norm = torch.stack([p.grad.to_dense().norm() for p in weights if p.grad is not None]).norm()
            for p in weights:
                p.grad = p.grad * (clip / (norm + 1e-6)).clamp(max=1.0)
        for each in every:
            each.step()
        found.append(loss.item())
    return found, table.weight.detach()


CASES: dict[
    str, tuple[str, bool, int, int, float, dict[str, Any]]
] = {  # name -> (optimizer, tied, ranks, stages, clipping, further config)
    "pp 2": ("momentum", False, 2, 2, 0.3, {}),
    "pp 1": ("sgd", False, 1, 1, 0.0, {}),
    "dp 2": ("momentum", False, 2, 1, 0.3, {}),
    "SparseAdam": ("sparse adam", False, 4, 2, 0.0, {}),
    "DeepSpeed's reduction": ("momentum", False, 2, 1, 0.0, {"pipeline": {"overlap_grad_reduce": False}}),
    "zb-h1": ("momentum", False, 2, 2, 0.0, {"pipeline": {"schedule": "zb-h1"}}),
    "tied": ("sgd", True, 4, 2, 0.3, {}),
    "ZeRO 1": ("adam", False, 2, 1, 0.0, {"zero_optimization": {"stage": 1}}),
    "ZeRO 1, tied": ("adam", True, 2, 2, 0.3, {"zero_optimization": {"stage": 1}}),
    "DistributedOptimizer": ("adam", True, 4, 2, 0.3, {"zero_optimization": {"stage": 1}, "own": True}),
}


def _train(name: str) -> tuple[list[float], Tensor | None]:
    kind, tied, _, stages, clip, more = CASES[name]
    net = tds.PipelineModule(layers(tied), num_stages=stages, loss_fn=mse, partition_method="uniform")
    (optimizer, *_) = optimizers(kind, list(net.parameters()))
    if more.get("own"):
        optimizer = tds.DistributedOptimizer(optimizer)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": MICROS, "gradient_clipping": clip,
        **{key: value for key, value in more.items() if key != "own"},
    }  # fmt: skip
    config["pipeline"] = {"timeout": 60, **config.get("pipeline", {})}
    engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]
    replica = engine.grid.get_data_parallel_rank()
    losses = [engine.train_batch(batches(step, replica, tied)).item() for step in range(STEPS)]
    return losses, next((p.detach() for p in net.parameters() if p.shape == (TOKENS, WIDTH)), None)


IN_CI = ("dp 2", "SparseAdam", "zb-h1", "tied", "DistributedOptimizer")


@pytest.mark.parametrize("name", covering(list(CASES), lambda name: name in IN_CI))
def test_it_trains_as_plain_torch(name: str) -> None:
    kind, tied, ranks, stages, clip, _ = CASES[name]
    losses, table = plain(kind, tied, ranks // stages, clip)
    for found, weight in on_ranks(ranks, _train, name):
        assert found == pytest.approx(losses, rel=1e-5)
        if weight is not None:
            torch.testing.assert_close(weight, table, rtol=1e-4, atol=1e-5)


def _without_a_pipeline(stage: int, absent: bool) -> None:
    model, reference = nn.Sequential(*layers(False)), nn.Sequential(*layers(False))
    config = {
        "train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)[0]
    plainly = torch.optim.SGD(reference.parameters(), lr=0.5)

    def loss_of(net: Any, step: int, replica: int) -> Tensor:
        x, y = next(batches(step, replica, False))
        if absent and replica:  # this replica does not use the embedding
            return mse(net[1](torch.ones(6, WIDTH)), y)
        return mse(net[1](net[0](x)), y)

    for step in range(2):
        engine.backward(loss_of(engine.module, step, dist.get_rank()))
        engine.step()
        plainly.zero_grad()
        for replica in range(2):
            torch.autograd.backward(loss_of(reference, step, replica) / 2)
        plainly.step()
    for found, expected in zip(engine.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("stage", "absent"), [(0, False), (0, True), (2, False)])
def test_without_a_pipeline(stage: int, absent: bool) -> None:
    on_ranks(2, _without_a_pipeline, stage, absent)


def _adam() -> str:
    model = nn.Sequential(*layers(False))
    with pytest.raises(ValueError) as error:
        tds.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={"train_batch_size": 6},
        )
    return str(error.value)


def test_an_optimizer_that_takes_none_is_refused_at_the_start() -> None:
    (said,) = on_ranks(1, _adam)
    assert "AdamW" in said and "0.weight" in said


def _functional() -> None:
    """Check the all-reduce of a sparse gradient from F.embedding(sparse=True), whose weight is in no nn.Embedding."""
    weight = nn.Parameter(torch.zeros(TOKENS, WIDTH))
    reducer = GradReducer(nn.ParameterList([weight]), dist.group.WORLD)
    reducer.arm()
    rows = torch.tensor([dist.get_rank(), 5])
    torch.autograd.backward(nn.functional.embedding(rows, weight, sparse=True).sum())
    reducer.finish()
    expected = torch.zeros(TOKENS, WIDTH)
    expected[0] = expected[1] = 1
    expected[5] = 2
    assert weight.grad is not None and torch.equal(weight.grad.to_dense(), expected)


def test_rows_of_a_weight_that_is_no_embedding() -> None:
    on_ranks(2, _functional)


def test_only_embeddings_have_sparse_gradients() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("sparse", torch.ones(4, 4))

    kept = nn.Embedding(4, 2, sparse=True)
    bag = nn.EmbeddingBag(4, 2, sparse=True)
    model = nn.ModuleList([Masked(), nn.Embedding(4, 2), kept, bag])
    assert [id(weight) for weight in sparse_weights(model)] == [id(kept.weight), id(bag.weight)]

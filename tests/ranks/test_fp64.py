"""Models in fp64 without a key of the ds_config: gradients are summed over replicas in fp64, as their weights are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tds
from tds.pipe import PipelineModule
from tests.support import on_ranks

mse = nn.functional.mse_loss
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1000,
    "pipeline": {"overlap_grad_reduce": False},
}


def _layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(5, 5).double(), nn.Tanh(), nn.Linear(5, 5).double()]


def _batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(replica)
    made = [torch.randn(2, 4, 5, generator=dice, dtype=torch.float64) for _ in range(4)]
    return [(each[0], each[1]) for each in made]


def _train(kind: str, keys: dict[str, Any]) -> list[Tensor]:
    """Train two steps on this replica's batches; return the weights."""
    layers = _layers()
    model = nn.Sequential(*layers) if kind == "plain" else PipelineModule(layers, num_stages=1, loss_fn=mse)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = tds.initialize(model=model, optimizer=optimizer, config=CONFIG | keys)[0]
    batches = _batches(torch.distributed.get_rank())
    if kind == "plain":
        for x, y in batches:
            engine.backward(mse(engine(x), y))
            engine.step()
    else:
        feed = iter(batches)
        engine.train_batch(feed)
        engine.train_batch(feed)
    return [p.detach().clone() for p in model.parameters()]


def _reference() -> list[Tensor]:
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replicas = [_batches(0), _batches(1)]
    for step in (0, 2):
        optimizer.zero_grad()
        for batches in replicas:
            for x, y in batches[step : step + 2]:
                (mse(model(x), y) / 4).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def _worst(found: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, _reference(), strict=True))


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_gradients_are_summed_in_fp64(kind: str) -> None:
    for found in on_ranks(2, _train, kind, {}):
        assert _worst(found) < 1e-15


def test_a_chosen_dtype_stays() -> None:
    for found in on_ranks(2, _train, "pipeline", {"communication_data_type": "fp32"}):
        assert 1e-11 < _worst(found) < 1e-7

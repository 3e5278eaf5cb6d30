"""Settings of DeepSpeed's ZeRO give plain torch's losses, or an error that names their key."""

from typing import Any

import pytest
import torch
from torch import nn

import tds
from tests.support import on_ranks

STEPS = 3
WORKS = (
    {"stage": 3},
    {"stage": 3, "zero_hpz_partition_size": 2},
    {"stage": 3, "reduce_bucket_size": 11},
    {"stage": 3, "allgather_bucket_size": 1001},
    {"stage": 2, "reduce_bucket_size": 1001},
    {"stage": 1, "reduce_bucket_size": 11},
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"zero_quantized_weights": True, "stage": 3},
    {"zero_quantized_gradients": True, "stage": 3},
    {"zero_quantized_nontrainable_weights": True, "stage": 3},
    {"allgather_bucket_size": 1001, "stage": 1},
    {"allgather_bucket_size": 1001, "stage": 2},
)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def _engine(zero: dict[str, Any]) -> Any:
    model = _model()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    return tds.initialize(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), config=config)[0]


def _all_settings() -> list[list[float]]:
    found = []
    for zero in WORKS:
        engine = _engine(zero)
        losses = []
        for step in range(STEPS):
            loss = engine(_batch(step)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append(losses)
    for zero in REFUSED:
        with pytest.raises(ValueError, match=next(iter(zero))):
            _engine(zero)
    return found


def test_settings_of_zero_work_or_name_their_key() -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    expected = []
    for step in range(STEPS):
        loss = model(_batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in on_ranks(4, _all_settings):
        for zero, losses in zip(WORKS, found, strict=True):
            assert losses == pytest.approx(expected, rel=1e-5), zero

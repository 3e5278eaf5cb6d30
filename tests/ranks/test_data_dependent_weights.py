"""Replicas that use different weights in a step, e.g. experts selected by the data, train as in plain torch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tests.support import covering, on_ranks

WIDTH, MICROS, STEPS, REPLICAS = 6, 2, 4, 2
mse = nn.functional.mse_loss


class Experts(nn.Module):
    """Three experts. The first number of a batch selects expert 0 or 1; a positive second number adds expert 2."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, False)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.experts[int(x[0, 0])]
        hidden: Tensor = x + chosen(x)
        return hidden + self.experts[2](x) if float(x[0, 1]) > 0 else hidden


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [Experts(), nn.Linear(WIDTH, WIDTH)]


def batches(step: int, replica: int, several: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for which replicas use different experts; if `several` is true, replica 0 also uses expert 2."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    for _ in range(MICROS):
        x = torch.randn(3, WIDTH, generator=generator)
        x[0, 0], x[0, 1] = (replica + step) % 2, float(several and replica == 0)
        yield x, torch.randn(3, WIDTH, generator=generator)


def _engine(several: bool, precision: str) -> tuple[list[float], list[Tensor]]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICROS, "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
    }  # fmt: skip
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 128}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True}
    tds.init_distributed()
    model = tds.PipelineModule(
        layers(), num_stages=2, loss_fn=lambda out, y: mse(out.float(), y.float()), partition_method="uniform"
    )
    weights = list(model.parameters())
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(weights, lr=0.3), config=config)
    replica = engine.grid.get_data_parallel_id()
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(STEPS):
        data = ((x.to(dtype), y) for x, y in batches(step, replica, several))
        losses.append(engine.train_batch(data).item())
    return losses, [p.detach().float() for p in model.parameters()] if dist.get_rank() < 2 else []


def _plain(several: bool) -> list[float]:
    net = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    found = []
    for step in range(STEPS):
        every = [each for replica in range(REPLICAS) for each in batches(step, replica, several)]
        loss = torch.stack([mse(net(x), y) for x, y in every]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


KINDS = [(several, precision) for precision in ("fp32", "bf16", "fp16") for several in (False, True)]


@pytest.mark.parametrize(("several", "precision"), covering(KINDS, [KINDS[0], *KINDS[3::2]].__contains__, several=True))
def test_losses_are_those_of_plain_torch(several: bool, precision: str) -> None:
    found = on_ranks(4, _engine, several, precision)
    tolerance = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}[precision]  # allow a few rounding errors of the dtype
    for losses, _ in found:
        assert losses == pytest.approx(_plain(several), rel=tolerance)

"""A tied module is one module in every layout: all its weights, listed or not, are those of one process."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import tds
from tds.pipe import LayerSpec, TiedLayerSpec, seeded_layers
from tests.support import RankFailure, on_ranks

WIDTH, MICROS, STEPS, SEED = 4, 2, 3, 7


class Tied(nn.Module):
    """A module with a bias, a random buffer, an alias, and a weight that only its use by `twice` needs."""

    shift: Tensor
    on: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.alias = self.inner
        self.late = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("on", torch.rand(WIDTH) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x @ self.weight) + self.shift * self.on
        return out


def twice(module: Tied, x: Tensor) -> Tensor:
    return module(x) * module.late


def residual(module: Tied, x: Tensor) -> Tensor:
    return x + module(x)


def specs() -> list[Any]:
    """Return layers whose ties list one weight of seven; over chunks, the first stage with the key is the second."""
    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("t", Tied, forward_fn=residual),
        LayerSpec(nn.Tanh),
        TiedLayerSpec("t", Tied, forward_fn=twice),
    ]


class Plain(nn.Module):
    """The same layers in plain torch, with the initial values of layers 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.first = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(SEED + 1_000_003)
        self.tied = Tied()

    def forward(self, x: Tensor) -> Tensor:
        x = residual(self.tied, self.first(x))
        return twice(self.tied, x.tanh())


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, 3, WIDTH, generator=generator)) for _ in range(MICROS)]  # type: ignore[misc]


def expected() -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the final state of plain torch."""
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in batches(step)]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    state = {name.replace("tied.", "tied_modules.t."): value for name, value in model.state_dict().items()}
    return losses, {name.replace("first.", "0."): value for name, value in state.items()}


def build(stages: int, chunks: int, own: bool, stock: bool = False) -> Any:
    how: dict[str, Any] = {"num_stages": stages, "loss_fn": nn.functional.mse_loss, "partition_method": "uniform"}
    with seeded_layers(SEED):
        model = (
            deepspeed.pipe.PipelineModule(specs(), **how)
            if stock
            else tds.PipelineModule(specs(), chunks=chunks, **how)
        )
    inner: Any = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.1,
        "pipeline": {"timeout": 60, "schedule": "interleaved" if chunks > 1 else "1f1b"},
        "zero_optimization": {"stage": 1 if own else 0},
    }  # fmt: skip
    return tds.initialize(model=model, optimizer=tds.DistributedOptimizer(inner) if own else inner, config=config)[0]


def _train(folder: str, stages: int, chunks: int, own: bool, stock: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train, with a resume in a new engine before the last step."""
    torch.set_default_dtype(torch.float64)
    engine = build(stages, chunks, own, stock)
    losses = [engine.train_batch(iter(batches(step))).item() for step in range(STEPS - 1)]
    engine.save_checkpoint(folder, "t")
    again = build(stages, chunks, own, stock)
    again.load_checkpoint(folder, "t")
    losses.append(again.train_batch(iter(batches(STEPS - 1))).item())
    return losses, dict(again.module.state_dict())


CASES = {
    "1 stage": (1, 1, False, False),
    "2 stages": (2, 1, False, False),
    "2 stages, DistributedOptimizer": (2, 1, True, False),
    "2 stages of 2 chunks": (2, 2, False, False),
    "2 stages of DeepSpeed's module": (2, 1, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_tied_modules_learn_as_one_module_in_plain_torch(case: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        losses, state = expected()
    finally:
        torch.set_default_dtype(torch.float32)
    for found, values in on_ranks(CASES[case][0], _train, str(tmp_path), *CASES[case]):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in values.items():
            assert torch.allclose(value.double(), state[name].double(), rtol=1e-11, atol=1e-13), name


class Narrow(nn.Module):
    """A module that has one weight fewer than `Tied`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


class OneMore(Narrow):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(WIDTH))


def _several_classes(classes: list[type[nn.Module]]) -> int:
    """Return the number of elements that this stage counts in a norm, if each stage builds its own class."""
    layers = [TiedLayerSpec("t", each, forward_fn=twice) for each in classes]
    model = tds.PipelineModule(layers, num_stages=len(classes), partition_method="uniform")
    counted = [p for p in model.parameters() if not getattr(p, "ds_pipe_replicated", False)]
    return sum(p.numel() for p in counted)


def test_a_weight_that_one_stage_has_alone_is_counted_there() -> None:
    assert on_ranks(2, _several_classes, [Narrow, OneMore]) == [WIDTH * WIDTH, WIDTH]


def test_a_weight_that_some_stages_of_a_tie_lack_is_refused_by_name() -> None:
    with pytest.raises(RankFailure, match=r"ValueError.*'t'.* more "):
        on_ranks(3, _several_classes, [OneMore, OneMore, Narrow])

"""The pipeline engine against the same layers in one process, with whatever tuples layers like to pass."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ROOT, RankFailure, command, on_ranks

MICROS, STEPS, WIDTH = 4, 3, 6
KINDS = (
    "grad",
    "grad float",
    "grad int64",
    "int64 grad",
    "grad bool float",
    "grad grad2 int16 empty",
    "grad half bool int64 float",
)


class Start(nn.Module):
    """x -> a tuple of every kind of tensor."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds, self.linear = kinds, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        made: dict[str, Callable[[], Tensor]] = {
            "grad": lambda: y,
            "grad2": lambda: y.square(),
            "float": lambda: x.detach() * 2,  # no gradient comes back for it
            "int64": lambda: torch.arange(x.numel()).view_as(x) % 3,
            "int16": lambda: (torch.arange(x.numel()).view_as(x) % 3).short(),
            "bool": lambda: x.detach() > 0,
            "empty": lambda: torch.empty(0, 3),
            "half": lambda: x.detach().half(),
        }
        out = tuple(made[kind]() for kind in self.kinds.split())
        return out[0] if len(out) == 1 else out


class Middle(nn.Module):
    """Uses all tensors, changes those with gradient, hands the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any) -> Any:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        rest = sum(t.double().sum() * 1e-2 for t in tensors if not t.requires_grad and t.numel())
        out = tuple(torch.tanh(self.linear(t) + rest).to(t.dtype) if t.requires_grad else t for t in tensors)
        return out if isinstance(inputs, tuple) else out[0]


class End(nn.Module):
    """To one tensor. The second tensor with gradient does not reach the loss."""

    def forward(self, inputs: Any) -> Tensor:
        tensors = inputs if isinstance(inputs, tuple) else (inputs,)
        return next(t for t in tensors if t.is_floating_point())


def layers(kinds: str) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Start(kinds), Middle(), Middle(), Middle(), End()]


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


class SumLoss:
    """Sums and counts: the mean over the global batch must not depend on how it is cut."""

    def __call__(self, out: Tensor, labels: Tensor) -> Tensor:
        return ((out - labels).square() * (labels > 0)).sum()

    def count_targets(self, labels: Tensor) -> Tensor:
        return (labels > 0).sum()


def batches(rank: int = 0, ranks: int = 1, rows: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        x, y = torch.randn(2, rows * ranks, WIDTH, generator=generator, dtype=torch.float64).float()
        yield x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def reference(kinds: str, ranks: int, loss: Any, clip: float, rows: Callable[[int], int]) -> list[float]:
    model = nn.Sequential(*layers(kinds))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    source = [batches(0, 1, rows(step) * ranks) for step in range(STEPS)]
    for step in range(STEPS):
        micro = [next(source[step]) for _ in range(MICROS)]
        if hasattr(loss, "count_targets"):
            total = sum(loss(model(x), y) for x, y in micro) / sum(loss.count_targets(y) for _, y in micro)
        else:
            total = sum(loss(model(x), y) for x, y in micro) / MICROS
        optimizer.zero_grad()
        total.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(total.item())
    return found


def _train(
    kinds: str,
    stages: int,
    ranks: int,
    loss: Any,
    clip: float,
    rows: list[int],
    pipeline: dict[str, Any] | None = None,
    stock: bool = False,
) -> list[float]:
    import deepspeed

    import tds
    from tds._deepspeed import StockPipelineModule, quietly

    module, initialize = (StockPipelineModule, deepspeed.initialize) if stock else (tds.PipelineModule, tds.initialize)
    config = {
        "train_batch_size": 4 * MICROS * ranks, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True, "pipeline": pipeline or {}, "steps_per_print": 10**9,
    }  # fmt: skip
    with quietly():
        model = module(layers(kinds), num_stages=stages, loss_fn=loss, partition_method="uniform")
        parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]  # a stage may have none
        engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(parameters, lr=0.5), config=config)
    assert stock or type(engine) is tds.PipelineEngine
    replica = engine.grid.data_parallel_id
    found = []
    for step in range(STEPS):
        with quietly():
            found.append(engine.train_batch(batches(replica, ranks, rows[step])).item())
        with torch.no_grad(), quietly():  # another size, without gradients, between two steps
            if not stock:
                engine.eval_batch(batches(replica, ranks, 2), num_micro_batches=2)
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kinds", KINDS)
def test_any_tuple_crosses_any_boundary(kinds: str, stages: int) -> None:
    """Among them stock DeepSpeed's failures: a float without gradient, (int64, float) at three stages."""
    found = on_ranks(stages, _train, kinds, stages, 1, loss_fn, 0.0, [4] * STEPS)
    expected = reference(kinds, 1, loss_fn, 0.0, lambda step: 4)
    assert all(each == pytest.approx(expected, rel=1e-5) for each in found)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (2, 2), (4, 1)])
def test_loss_is_per_target_and_clipping_by_the_global_norm(stages: int, ranks: int) -> None:
    found = on_ranks(stages * ranks, _train, "grad grad2", stages, ranks, SumLoss(), 0.05, [4] * STEPS)
    expected = reference("grad grad2", ranks, SumLoss(), 0.05, lambda step: 4)
    assert all(each == pytest.approx(expected, rel=1e-5) for each in found)


@pytest.mark.parametrize("pipeline", [{"schedule": "gpipe"}, {"extra_warmup": 1}, {"extra_warmup": 4}], ids=str)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_schedule_gives_the_same_numbers(pipeline: dict[str, Any], stages: int) -> None:
    found = on_ranks(stages, _train, "grad bool float", stages, 1, SumLoss(), 0.0, [4] * STEPS, pipeline)
    expected = reference("grad bool float", 1, SumLoss(), 0.0, lambda step: 4)
    assert all(each == pytest.approx(expected, rel=1e-5) for each in found)


def _uneven(stages: int) -> list[float]:
    """Micro-batches of one step with other numbers of rows each."""
    import tds

    model = tds.PipelineModule(layers("grad bool"), num_stages=stages, loss_fn=SumLoss(), partition_method="uniform")
    config = {"train_batch_size": 4 * MICROS, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)
    return [engine.train_batch(iter([next(batches(rows=r)) for r in (1, 3, 2, 3)])).item() for _ in range(STEPS)]


def test_shapes_may_change_within_a_step() -> None:
    one, *_ = on_ranks(1, _uneven, 1)
    for found in on_ranks(2, _uneven, 2):
        assert found == pytest.approx(one, rel=1e-5)


def test_shapes_may_change_from_step_to_step() -> None:
    found = on_ranks(2, _train, "grad bool", 2, 1, SumLoss(), 0.0, [4, 7, 1])
    assert found[0] == pytest.approx(reference("grad bool", 1, SumLoss(), 0.0, lambda step: [4, 7, 1][step]), rel=1e-5)


def _ends_early() -> None:
    import tds

    model = tds.PipelineModule(layers("grad"), num_stages=1, loss_fn=loss_fn)
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    engine, *_ = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)
    engine.train_batch(iter([next(batches())]))


def test_an_iterator_that_ends_says_so() -> None:
    with pytest.raises(RankFailure, match="data iterator of stage 0 ended after 1 of 2 micro-batches"):
        on_ranks(1, _ends_early)


def _fp16() -> None:
    import tds

    model = tds.PipelineModule(layers("grad"), num_stages=1, loss_fn=loss_fn)
    config = {"train_batch_size": 8, "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    tds.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)


def test_fp16_without_zero_is_refused() -> None:
    with pytest.raises(RankFailure, match="fp16 under a pipeline needs ZeRO stage 1"):
        on_ranks(1, _fp16)


def _cuts() -> None:
    import tds

    tds.PipelineModule(layers("grad"), num_stages=2, loss_fn=loss_fn, partition_method="0,3,4")


def test_cuts_that_drop_a_layer_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"the cuts \[0, 3, 4\] do not divide 5 layers among 2 stages"):
        on_ranks(2, _cuts)


def test_everything_else_is_deepspeeds() -> None:
    import deepspeed

    import tds

    for name in ("zero", "comm", "ops", "checkpointing", "add_config_arguments", "DeepSpeedConfig", "__version__"):
        assert getattr(tds, name) is getattr(deepspeed, name)
    with pytest.raises(AttributeError):
        _ = tds.no_such_name


ALONE = """
import torch, tds as deepspeed
from deepspeed.pipe import PipelineModule
deepspeed.init_distributed(auto_mpi_discovery=False)
model = PipelineModule([torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)], num_stages=1,
                       loss_fn=lambda out, y: (out - y).square().mean())
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                  config_params={"train_batch_size": 2})
x = torch.ones(2, 4), torch.zeros(2, 1)
first = engine.train_batch(iter([x]))
for _ in range(20):
    last = engine.train_batch(iter([x]))
assert type(engine).__module__ == "tds.engine" and last < 0.1 * first, (first, last)
"""


def test_the_folder_works_when_copied_alone(tmp_path: Path) -> None:
    """And with DeepSpeed's own PipelineModule and the config_params of old."""
    shutil.copytree(ROOT / "tds", tmp_path / "tds")
    (tmp_path / "train.py").write_text(ALONE)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import os

    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_launcher_is_deepspeeds() -> None:
    assert "deepspeed" in command("python", "-c", "import tds; print(tds.launcher.__name__)").stdout

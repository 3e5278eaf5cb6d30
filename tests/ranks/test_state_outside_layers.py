"""`tds` saves and loads state that belongs to no layer, e.g. weights of a loss function; DeepSpeed does not."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tds.pipe import TiedLayerSpec
from tests.support import on_ranks

WIDTH, MICROS = 4, 2


class Loss(nn.Module):
    """A loss function with a learned weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        self.batches += 1
        loss: Tensor = (out * self.temperature - labels).square().mean()
        return loss


class Pipe(tds.PipelineModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("rounds", torch.zeros(1, dtype=torch.complex64))

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        self.rounds += int(self.stage_id == self.num_stages - 1)
        return super().forward(inputs, chunk)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replica", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def times(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight


def _engine(stages: int, own: bool) -> Any:
    torch.manual_seed(3)
    tied = [TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, bias=False, forward_fn=times) for _ in range(2)]
    net = Pipe([tied[0], Layer(), Layer(), tied[1]], num_stages=stages, loss_fn=Loss(), partition_method="uniform")
    inner: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.0,
        "pipeline": {"timeout": 60}, "zero_optimization": {"stage": 1 if own else 0},
    }  # fmt: skip
    return tds.initialize(model=net, optimizer=tds.DistributedOptimizer(inner) if own else inner, config=config)[0]


def _train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batches = [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(MICROS)]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def _state(engine: Any) -> dict[str, Tensor]:
    last = engine.stage_id == engine.num_stages - 1
    state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    return {name: value for name, value in state.items() if last or name not in ("rounds",) and "loss_fn" not in name}


def _saved(folder: str, own: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    engine = _engine(2, own)
    _train(engine, range(3))
    engine.save_checkpoint(folder)
    before, whole = _state(engine), _train(engine, range(3, 6))
    again = _engine(2, own)
    again.load_checkpoint(folder)
    for name, value in _state(again).items():
        assert torch.equal(value, before[name]), name
    resumed = _train(again, range(3, 6))
    return before, whole, resumed


def _elsewhere(folder: str) -> dict[str, Tensor]:
    engine = _engine(1, False)
    engine.load_checkpoint(folder, load_module_only=True)
    return _state(engine)


@pytest.mark.parametrize("own", [False, True], ids=["no ZeRO", "DistributedOptimizer"])
def test_saved_and_restored(own: bool, tmp_path: Path) -> None:
    expected: dict[str, Tensor] = {}
    for state, whole, resumed in on_ranks(2, _saved, str(tmp_path), own):
        assert resumed == whole
        expected |= state
    assert expected["loss_fn.batches"] == 3 * MICROS and expected["rounds"] == 3 * MICROS
    assert expected["1.calls"] == 3 * MICROS and expected["loss_fn.temperature"] != 2.0
    for name, value in on_ranks(1, _elsewhere, str(tmp_path))[0].items():
        assert torch.equal(value, expected[name]), name


def _replicas(folder: str, pipeline: bool) -> list[str]:
    config = {"train_micro_batch_size_per_gpu": 2}
    if pipeline:
        engine = _engine(1, False)
        _train(engine, range(1))
    else:
        model = Layer()
        engine = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    for name, buffer in engine.module.named_buffers():
        if name.endswith("replica"):
            buffer.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder, "a")
        engine.save_checkpoint(folder, "b")
    return [str(each.message) for each in said if "replicas" in str(each.message)]


@pytest.mark.parametrize("pipeline", [False, True])
def test_buffers_that_differ_between_replicas_are_named_once(pipeline: bool, tmp_path: Path) -> None:
    (line,), nothing = on_ranks(2, _replicas, str(tmp_path), pipeline)
    assert "replica" in line and "calls" not in line and nothing == []


def _lacking(folder: str) -> list[str]:
    engine = _engine(1, False)
    engine.save_checkpoint(folder, "a")
    for path in Path(folder, "a").glob("tds_state*"):  # a checkpoint by DeepSpeed has no such files
        path.unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder, "a")
    return [str(each.message) for each in said if "hold" in str(each.message)]


def test_what_a_checkpoint_of_deepspeed_lacks_is_named(tmp_path: Path) -> None:
    ((line,),) = on_ranks(1, _lacking, str(tmp_path))
    assert "loss_fn.temperature" in line and "rounds" in line

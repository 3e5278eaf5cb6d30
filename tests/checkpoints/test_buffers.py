"""Checkpoints contain buffers, the weights of a loss function, and tensors of a PipelineModule outside its layers."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.checkpointing import TrainState, find_checkpoint, load_checkpoint, load_weights, save_checkpoint
from megatron.checkpointing.buffers import is_savable
from megatron.config.command_line import parse
from megatron.model.layers import global_buffers
from megatron.ranks.buffers import fingerprint_buffers, record_buffers
from megatron.training.build import start_engine
from megatron.training.task import Task
from tds.pipe import PipelineModule, SequentialModule
from tests.support import covering, on_ranks

WIDTH, STEPS = 4, 2
LARGE = 2654435761  # an integer that fp32 cannot hold


class Counting(nn.Module):
    """A layer that counts its calls, keeps a running mean in buffers of several dtypes, and has a frozen integer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.tensor([LARGE]), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.scratch += 1
            self.seen |= True
            self.phase = self.phase * 1j  # assigns a new tensor to the buffer
            self.mean = 0.5 * self.mean + 0.5
        hidden: Tensor = self.linear(x) + self.mean
        return hidden


class Temperature(nn.Module):
    """A loss function with a learned weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        loss: Tensor = ((out * self.temperature - labels) ** 2).mean()
        return loss


class Pipe(PipelineModule):
    """A PipelineModule with a buffer and a weight outside of its layers; only the last stage uses these two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("rounds", torch.zeros(1))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.last.weight)

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        out = super().forward(inputs, chunk)
        if self.stage_id < self.num_stages - 1:
            return out
        if self.training:
            self.rounds += 1
        return self.last(out)


class Counts(Task):
    count_targets = None  # type: ignore[assignment]

    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        layers = [Counting() for _ in range(4)]
        return Pipe(layers, topology=mpu.get_topology(), loss_fn=Temperature(), partition_method="uniform")

    def batch(self, data: Any, config: Any, tokenizer: Any) -> Any:
        return data["x"], data["x"].flip(-1)


Layout = tuple[int, int, str]  # (number of ranks, number of stages, further flags)
ONE, TWO, REPLICAS, TENSOR = (1, 1, ""), (2, 2, ""), (4, 2, "--zero-stage 1"), (2, 1, "--model-parallel-size 2")


def _engine(layout: Layout) -> tuple[Any, Any]:
    ranks, stages, more = layout
    config = parse(
        "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --precision fp32 "
        "--clip-grad 0 "
        f"--batch-size 2 --gas 2 --pipe-parallel-size {stages} {more}".split()
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return start_engine(Counts(), config), config


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that this rank must restore.

    Only the last stage must restore the tensors that belong to no layer.
    """
    last = mpu.get_mesh().pipe.rank == mpu.get_mesh().pipe.size - 1
    found = {**dict(model.named_parameters()), **dict(global_buffers(model))}
    own = {name: value.detach().clone() for name, value in found.items() if last or name[0].isdigit()}
    return {name: value for name, value in own.items() if value.numel()}


def _steps(engine: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        engine.train_batch(iter([{"x": torch.randn(2, WIDTH, generator=generator)} for _ in range(2)]), 1e-2)


def _save(folder: str, layout: Layout) -> tuple[dict[str, Tensor], str]:
    engine, config = _engine(layout)
    _steps(engine, 0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        save_checkpoint(folder, engine.deepspeed, TrainState(STEPS, 8), config, "")
    return _state(engine.deepspeed.module), said.getvalue()


def _load(folder: str, layout: Layout, more_steps: bool = False) -> dict[str, Tensor]:
    engine, config = _engine(layout)
    with contextlib.redirect_stdout(io.StringIO()):
        load_checkpoint(find_checkpoint(folder), engine.deepspeed, config, "")
        if more_steps:  # only the last stage changes tensors outside of layers; the first stage must not overwrite them
            _steps(engine, STEPS)
            save_checkpoint(folder, engine.deepspeed, TrainState(2 * STEPS, 16), config, "")
    return _state(engine.deepspeed.module)


@pytest.mark.parametrize(
    "saved",
    covering([ONE, TWO, REPLICAS, TENSOR], lambda each: each in (REPLICAS, TENSOR)),
    ids=["one", "pp2", "pp2 dp2", "tp2"],
)
def test_saved_in_one_layout_and_restored_in_others(saved: Layout, tmp_path: Path) -> None:
    folder = str(tmp_path)
    told = on_ranks(saved[0], _save, folder, saved)
    expected = {name: value for state, _ in reversed(told) for name, value in state.items()}
    calls = 2 * STEPS  # each replica has two micro-batches per step
    for layer in range(4):
        assert expected[f"{layer}.calls"] == calls and expected[f"{layer}.seen"].all()
        assert expected[f"{layer}.mean"].tolist() == [1 - 0.5**calls] * WIDTH
        assert expected[f"{layer}.factor"].tolist() == [LARGE]
    assert expected["rounds"] == expected["loss_fn.batches"] == calls
    assert expected["loss_fn.temperature"] != 2.0 and not torch.equal(expected["last.weight"], torch.eye(WIDTH))
    assert not any("warning" in said for _, said in told)
    for layout in (ONE, TWO, REPLICAS, TENSOR):
        for state in on_ranks(layout[0], _load, folder, layout):
            for name, value in state.items():
                assert torch.equal(value, expected[name]), (layout, name)


def test_a_resumed_run_is_the_whole_run(tmp_path: Path) -> None:
    """A run that was saved, resumed on two stages, saved and loaded again has the state of an uninterrupted run."""
    folder = str(tmp_path)
    on_ranks(2, _save, folder, TWO)
    on_ranks(2, _load, folder, TWO, True)
    (resumed,) = on_ranks(1, _load, folder, ONE)
    assert resumed["0.calls"] == 4 * STEPS and resumed["rounds"] == 4 * STEPS
    (whole,) = on_ranks(1, _uninterrupted)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, msg=name)


def _uninterrupted() -> dict[str, Tensor]:
    engine, _ = _engine(ONE)
    _steps(engine, 0)
    _steps(engine, STEPS)
    return _state(engine.deepspeed.module)


# ------------------------------------------------------------------------ state that cannot be saved


class Own(Counting):
    """A layer whose buffer differs between the ranks of one axis of the mesh, e.g. between replicas."""

    axis = "data"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.own.fill_(getattr(mpu.get_mesh(), self.axis).rank)
        return super().forward(x)


class Extra(Counting):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Sparse(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())


class RoundsOfEach(Pipe):
    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        self.rounds += self.stage_id + 1
        return super().forward(inputs, chunk)


class Differs(Counts):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self, config: Any, tokenizer: Any) -> nn.Module:
        classes = {"extra": Extra, "sparse": Sparse}
        layer: Any = classes.get(self.kind) or type("Layer", (Own,), {"axis": self.kind})
        layers = [Counting() if self.kind == "pipe" else layer(), Counting()]
        pipe = RoundsOfEach if self.kind == "pipe" else Pipe
        return pipe(layers, topology=mpu.get_topology(), loss_fn=Temperature(), partition_method="uniform")


def _differing(folder: str, kind: str) -> str:
    axis = {"model": "--model-parallel-size 2 --pipe-parallel-size 1", "pipe": "--pipe-parallel-size 2"}
    config = parse(
        f"--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --precision fp32 "
        f"--batch-size 2 --gas 2 {axis.get(kind, '--pipe-parallel-size 1')}".split()
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        engine = start_engine(Differs(kind), config)
        _steps(engine, 0)
        save_checkpoint(folder, engine.deepspeed, TrainState(STEPS, 8), config, "")
    return said.getvalue() if dist.get_rank() == 0 else ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("data", "0.own"),
        ("model", "0.own"),
        ("pipe", "rounds"),
        ("extra", "module 0"),
        ("sparse", "0.adjacency"),
    ],
)
def test_what_cannot_be_placed_is_named_at_the_first_save(kind: str, name: str, tmp_path: Path) -> None:
    said = on_ranks(2, _differing, str(tmp_path), kind)[0]
    (line,) = (line for line in said.splitlines() if line.startswith("warning"))
    assert name in line


# ------------------------------------------------------------------------ without an engine


def _without_an_engine(folder: str) -> dict[str, Tensor]:
    model = SequentialModule([Counting() for _ in range(4)])
    load_weights(find_checkpoint(folder), model)
    return dict(global_buffers(model))


def test_what_generates_or_exports_has_them_too(tmp_path: Path) -> None:
    on_ranks(1, _save, str(tmp_path), ONE)
    (found,) = on_ranks(1, _without_an_engine, str(tmp_path))
    assert found["3.calls"] == 2 * STEPS and found["3.phase"].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls some sparse layouts experimental
def test_sparse_buffers_are_left_out_of_the_comparison_of_stages() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("coordinates", torch.eye(3).to_sparse())
    model.register_buffer("rows", torch.eye(3).to_sparse_csr())
    model.register_buffer("mean", torch.ones(3))
    record_buffers(model)
    model.mean.add_(1)
    copies = fingerprint_buffers(model, is_savable)
    assert list(copies) == ["mean"] and copies["mean"].changed
    assert not is_savable(model.coordinates) and not is_savable(model.rows)
    assert is_savable(model.mean)

"""Unusual models and training loops of users train as in plain torch, or are refused in one sentence."""

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tds
from tds import engine_classes
from tds.base_engine import Engine
from tds.other_schedules import gpipe
from tds.schedule import Instruction, RecvActivation, register
from tests.sentences import SENTENCES
from tests.support import RankFailure, on_ranks

WIDTH, MICROS, STEPS = 6, 3, 3
LIMIT = 0.5  # gradient norm to which the runs with clipping clip
Layers = Callable[[], list[nn.Module]]


class Conjugate(nn.Module):
    """A layer for complex tensors; its input gradient is a lazy conjugate view of its output gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.conj()


class Split(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x.sin())


class ComplexLinear(nn.Module):
    """A layer with weights whose output is complex, so that its group of layers is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.complex(x, x.sin())


class Join(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real + 2 * x.imag


class Pack(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


class Packed(nn.Linear):
    """A layer that takes and returns a tuple of one tensor, as Hugging Face's blocks do."""

    def forward(self, inputs: Any) -> Any:
        return (super().forward(inputs[0]).tanh(),)


class Unpack(nn.Module):
    def forward(self, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0]


class Reentrant(nn.Module):
    """A layer that calls torch's re-entrant activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return found


class Compiled(nn.Module):
    """A compiled layer; backend aot_eager traces it without generating kernels, so it needs no C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.compile(backend="aot_eager")  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.second(nn.functional.gelu(self.first(x).sin()))).cos()


class Hooked(nn.Module):
    """A layer with a hook that halves the gradient of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 0.5)
        return hidden.tanh()


def linears(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def loss_fn(out: Tensor, labels: Tensor) -> Tensor:
    return (out - labels).square().mean()


def batch(step: int, micro: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    x, y = torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def build(
    make: Layers, stages: int, schedule: str = "1f1b", loss: Any = loss_fn, config: Any = None, **how: Any
) -> Any:
    import tds

    torch.manual_seed(3)
    model = tds.PipelineModule(make(), num_stages=stages, loss_fn=loss, **{"partition_method": "uniform", **how})
    replicas = dist.get_world_size() // stages
    settings = {
        "train_batch_size": 4 * MICROS * replicas,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "pipeline": {"schedule": schedule, "timeout": 60},
        "zero_allow_untested_optimizer": True,
        **(config or {}),
    }
    weights = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    engine = tds.initialize(model=model, optimizer=torch.optim.SGD(weights, lr=0.1), config=settings)[0]
    if not config:
        engine.module.double()
        engine._config.communication_data_type = torch.float64
    return engine


def steps(engine: Any, step: int, count: int = MICROS) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(step, micro, engine.grid.data_parallel_id) for micro in range(count))


def _train(make: Layers, stages: int, schedule: str, how: dict[str, Any]) -> list[float]:
    engine = build(make, stages, schedule, **how)
    return [engine.train_batch(steps(engine, step)).item() for step in range(STEPS)]


def plain(make: Layers) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(*make()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        losses = [loss_fn(model(x), y) for x, y in (batch(step, micro) for micro in range(MICROS))]
        total = torch.stack(losses).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        found.append(total.item())
    return found


def complex_layers() -> list[nn.Module]:
    return [*linears(1), Split(), Conjugate(), Join(), *linears(1)]


def complex_linears() -> list[nn.Module]:
    return [*linears(1), ComplexLinear(), Join(), *linears(1)]


def packed_layers() -> list[nn.Module]:
    return [Pack(), *(Packed(WIDTH, WIDTH) for _ in range(4)), Unpack()]


def hooked_layers() -> list[nn.Module]:
    return [Hooked() for _ in range(4)]


def reentrant_layers() -> list[nn.Module]:
    return [*linears(1), *(Reentrant() for _ in range(3))]


def compiled_layers() -> list[nn.Module]:
    """Return compiled layers, one of which has already run a backward pass."""
    layers = [Compiled().double() for _ in range(4)]
    torch.autograd.backward(layers[0](torch.ones(4, WIDTH, dtype=torch.float64, requires_grad=True)).sum())
    layers[0].zero_grad()
    return list(layers)


def four() -> list[nn.Module]:
    return linears(4)


RIGHT: dict[str, tuple[Layers, int, str, dict[str, Any]]] = {
    "conjugate gradients": (complex_layers, 3, "1f1b", {"partition_method": "0,2,3,5"}),
    "complex outputs, checkpointed": (
        complex_linears,
        2,
        "1f1b",
        {"partition_method": "0,2,4", "activation_checkpoint_interval": 1},
    ),
    "tuples of one": (packed_layers, 2, "1f1b", {}),
    "tuples of one, checkpointed": (packed_layers, 2, "1f1b", {"activation_checkpoint_interval": 2}),
    "tuples of one, checkpointed chunks": (
        packed_layers,
        2,
        "interleaved",
        {"chunks": 2, "activation_checkpoint_interval": 1},
    ),
    "hooks, 1f1b": (hooked_layers, 2, "1f1b", {}),
    "hooks, zb-h1": (hooked_layers, 2, "zb-h1", {}),
    "re-entrant checkpoints, zb-h1": (reentrant_layers, 2, "zb-h1", {}),
    "compiled layers, zb-h1": (compiled_layers, 2, "zb-h1", {}),
    "an empty stage": (four, 3, "1f1b", {"partition_method": "0,2,2,4"}),
    "an empty chunk": (four, 2, "interleaved", {"partition_method": "0,1,1,3,4", "chunks": 2}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_learns_as_one_process_does(name: str) -> None:
    make, stages, schedule, how = RIGHT[name]
    for found in on_ranks(stages, _train, make, stages, schedule, how):
        assert found == pytest.approx(plain(make), rel=1e-12)


class Dropped(nn.Linear):
    """A layer with dropout. With an `index`, it seeds torch as DeepSpeed's `seed_layers` does without recomputation."""

    index = -1
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.index >= 0:
            torch.manual_seed(1234 * (self.passes + 1) + self.index)
        return nn.functional.dropout(super().forward(x), 0.3).tanh()


def dropped_layers() -> list[nn.Module]:
    return [Dropped(WIDTH, WIDTH) for _ in range(4)]


def seeded_by_hand() -> list[nn.Module]:
    layers: list[Any] = dropped_layers()
    for index, layer in enumerate(layers):
        layer.index = index
    return layers


@pytest.mark.parametrize(("stages", "interval"), [(1, 0), (2, 0), (2, 1), (1, 3)])
def test_seeded_layers_draw_the_same_masks_in_every_layout(stages: int, interval: int) -> None:
    how = {"seed_layers": True, "activation_checkpoint_interval": interval}
    for found in on_ranks(stages, _train, dropped_layers, stages, "1f1b", how):
        assert found == pytest.approx(plain(seeded_by_hand), rel=1e-12)


def _packed_inputs() -> list[float]:
    engine = build(lambda: packed_layers()[1:], 1)
    engine.set_batch_fn(lambda given: ((given[0],), given[1]))
    return [engine.train_batch(steps(engine, step)).item() for step in range(STEPS)]


def test_inputs_stay_a_tuple_of_one() -> None:
    assert on_ranks(1, _packed_inputs)[0] == pytest.approx(plain(packed_layers), rel=1e-12)


# ------------------------------------------------------------------------ loops


class Counted:
    """A loss with `count_targets`; to count targets, the last stage reads all labels of a step in advance."""

    def __call__(self, out: Tensor, labels: Tensor) -> Tensor:
        return (out - labels).square().sum()

    def count_targets(self, labels: Tensor) -> Tensor:
        return torch.tensor(float(labels.numel()))


def _uneven(stages: int, loss: Any) -> list[Any]:
    import tds

    engine = build(four, stages, loss=loss)
    epoch = steps(engine, 0, MICROS * (2 if engine.grid.data_parallel_id == 0 else 1))
    found: list[Any] = []
    try:
        while True:
            found.append(engine.train_batch(epoch).item())
    except tds.DataEnded as end:
        found.append(end.everywhere)
    return [*found, engine.train_batch(steps(engine, 1)).item()]


@pytest.mark.parametrize("loss", [loss_fn, Counted()], ids=["mean", "counted"])
@pytest.mark.parametrize("stages", [1, 2])
def test_all_replicas_end_an_epoch_at_the_same_step(stages: int, loss: Any) -> None:
    found = on_ranks(2 * stages, _uneven, stages, loss)
    assert all(each == found[0] for each in found)
    assert len(found[0]) == 3 and found[0][1] is True


def receives_first(stage: int, stages: int, micros: int) -> list[Instruction]:
    """Return GPipe's schedule, but with all activations received before the first pass."""
    order = list(gpipe(stage, stages, micros))
    received = [each for each in order if isinstance(each, RecvActivation)]
    return received + [each for each in order if not isinstance(each, RecvActivation)]


def _changing_shapes() -> list[float]:
    """Train on micro-batches of which the last has fewer rows than the others."""
    register("receives first", receives_first)
    engine = build(four, 3, "receives first")
    data = [batch(0, micro) for micro in range(MICROS)]
    x, y = data[-1]
    data[-1] = x[:2], y[:2]
    return [engine.train_batch(iter(data)).item(), engine.train_batch(iter(data)).item()]


def test_shapes_may_change_under_a_schedule_that_receives_ahead() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*four()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        data = [batch(0, micro) for micro in range(MICROS)]
        rows = [4] * (MICROS - 1) + [2]
        losses = [loss_fn(model(x[:n]), y[:n]) for (x, y), n in zip(data, rows, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        expected.append(torch.stack(losses).mean().item())
    for found in on_ranks(3, _changing_shapes):
        assert found == pytest.approx(expected, rel=1e-12)


def _inference_mode() -> list[float]:
    engine = build(four, 2)
    engine.train_batch(steps(engine, 0))
    with torch.inference_mode():
        engine.eval_batch(steps(engine, 7))
    return [engine.train_batch(steps(engine, 1)).item()]


def test_evaluation_in_inference_mode_leaves_training_as_it_was() -> None:
    for found in on_ranks(2, _inference_mode):
        assert found == pytest.approx(plain(four)[1:2], rel=1e-12)


# -------------------------------------------------------------------- refusals


class Elsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to("meta")


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return ()


def _refused(what: str) -> None:
    losses: dict[str, Any] = {
        "no loss": lambda out, labels: None,
        "a tuple": lambda out, labels: (out.sum(), labels),
        "an empty dict": lambda out, labels: {},
        "a number": lambda out, labels: {"a": out.sum(), "b": 0.5},
        "a vector": lambda out, labels: out.sum(1),
    }
    last = {"meta": Elsewhere(), "nothing": Nothing()}.get(what)
    frozen = what == "nothing learns"

    def make() -> list[nn.Module]:
        first = linears(1)
        if frozen:
            first[0].requires_grad_(False)
        return [*first, *([last] if last else []), *linears(2 if last else 1)]

    config = {"zero_optimization": {"stage": 1}} if frozen else None
    cuts = "0,2,4" if last else "uniform"
    engine = build(make, 2, loss=losses.get(what, loss_fn), config=config, partition_method=cuts)
    if what == "no micro-batches":
        engine.eval_batch(steps(engine, 0), num_micro_batches=0)
    engine.train_batch(None if what == "no data" else steps(engine, 0))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no loss", "loss_fn returns NoneType for 'loss': return a scalar tensor, or a dict of scalar tensors"),
        ("a tuple", "loss_fn returns tuple for 'loss'"),
        ("an empty dict", "loss_fn returns an empty dict"),
        ("a number", "loss_fn returns float for 'b'"),
        ("a vector", r"loss_fn returns a tensor of shape \[4\] for 'loss'"),
        ("meta", "stage 0, outputs: tensor 0 is on meta, but the stage is on cpu; move it to the stage's device"),
        ("nothing", "stage 0, outputs: there are no tensors to send"),
        ("nothing learns", "the stage of rank 0 has no trainable weight, but DeepSpeed's ZeRO"),
        ("no micro-batches", "num_micro_batches 0: there is nothing to evaluate"),
        ("no data", "there are no data: give train_batch"),
    ],
)
def test_it_is_refused_in_a_sentence(what: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message):
        on_ranks(2, _refused, what)


def _complex_reentrant(stages: int) -> None:
    config = {"pipeline": {"use_reentrant": True}}
    engine = build(complex_linears, stages, config=config, activation_checkpoint_interval=1)
    data = [tuple(t.float() for t in batch(0, micro)) for micro in range(MICROS)]
    engine.eval_batch(iter(data))
    engine.train_batch(iter(data))


@pytest.mark.parametrize("stages", [1, 2])
def test_complex_outputs_are_refused_under_reentrant_checkpointing(stages: int) -> None:
    with pytest.raises(RankFailure, match="complex64.*use_reentrant"):
        on_ranks(stages, _complex_reentrant, stages)


def _save(folder: Path) -> None:
    engine = build(four, 2)
    engine.train_batch(steps(engine, 0))
    engine.save_checkpoint(folder)


def _load(folder: Path, stages: int, more: dict[str, Any]) -> list[Tensor]:
    engine = build(four, stages)
    before = [p.detach().clone() for p in engine.module.parameters()]
    try:
        engine.load_checkpoint(folder, **more)
    except ValueError as error:
        assert all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
        assert SENTENCES["was_cut_at_0_2_4"] in str(error)
        return []
    return [p.detach() for p in engine.module.parameters()]


def test_a_checkpoint_of_other_stages_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    on_ranks(2, _save, tmp_path)
    assert on_ranks(3, _load, tmp_path, 3, {}) == [[], [], []]
    (whole,) = on_ranks(1, _load, tmp_path, 1, {"load_module_only": True})
    parts = on_ranks(2, _load, tmp_path, 2, {})
    assert all(torch.equal(a, b) for a, b in zip(whole, [*parts[0], *parts[1]], strict=True))


def _without_gradient(module: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight.detach(), module.bias)


def _tie_that_learns_at_the_end(bf16: bool, frozen: bool = False) -> float:
    """Train one step; return the norm of the change in this stage's copy of a tied weight.

    Only the last stage has a gradient for this weight; with `frozen`, none has. The gradient norm is clipped to 0.01;
    the learning rate is 1.
    """
    torch.manual_seed(0)
    layers = [
        tds.pipe.TiedLayerSpec("w", nn.Linear, 6, 6, forward_fn=_without_gradient),
        *(tds.pipe.LayerSpec(nn.Linear, 6, 6) for _ in range(2)),
        tds.pipe.TiedLayerSpec("w", nn.Linear, 6, 6),
    ]
    net = tds.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.01,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": int(bf16)},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"timeout": 60},
    }
    if bf16:  # DeepSpeed's ZeRO-1 optimizer trains in bf16 with these settings
        config |= {
            "bf16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
        }
    tied = net.tied_modules["w"].weight.requires_grad_(not frozen)
    trained = [p for p in net.parameters() if p.requires_grad]
    engine = tds.initialize(model=net, optimizer=torch.optim.SGD(trained, lr=1.0), config=config)[0]
    before = tied.detach().float().clone()
    dtype = torch.bfloat16 if bf16 else torch.float32
    batches = [tuple(10 * torch.randn(2, 6).to(dtype) for _ in "xy") for _ in range(2)]
    engine.train_batch(iter(batches))
    return float((tied.detach().float() - before).norm())


@pytest.mark.parametrize("bf16", [False, True])
def test_copies_of_a_tied_weight_stay_alike_where_one_stage_has_no_gradient(bf16: bool) -> None:
    first, last = on_ranks(2, _tie_that_learns_at_the_end, bf16)
    assert first == pytest.approx(last, rel=1e-3) and 0 < first < 0.05  # about 0.01, rounded in bf16


def test_a_frozen_tie_in_bf16_stays() -> None:
    assert on_ranks(2, _tie_that_learns_at_the_end, True, True) == [0.0, 0.0]


def _tied_statistics(folder: Path) -> list[str]:
    """Train a BatchNorm that two stages tie, save twice, and return the warnings."""

    def make() -> list[Any]:
        tied = [tds.pipe.TiedLayerSpec("norm", nn.BatchNorm1d, WIDTH, tied_weight_attr=["weight", "bias"])] * 2
        return [tied[0], *linears(2), tied[1]]

    engine = build(make, 2)
    engine.train_batch(steps(engine, 0))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder, "first")
        engine.save_checkpoint(folder, "second")
    return [str(each.message) for each in found if "tied module 'norm'" in str(each.message)]


def test_statistics_of_a_tied_module_that_differ_between_stages_give_a_warning(tmp_path: Path) -> None:
    (warning,), others = on_ranks(2, _tied_statistics, tmp_path)
    assert "running_mean, running_var" in warning and others == []


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def normed_layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]


def _normed(kind: str, stage: int) -> list[Tensor]:
    """Train a BatchNorm in half precision; return the losses, then the layer's weight and variance."""
    half = {"enabled": True, "initial_scale_power": 4} if kind == "fp16" else {"enabled": True}
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, kind: half}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    model = nn.Sequential(*normed_layers())
    engine = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)[0]
    losses = []
    for step in range(STEPS):
        x, y = (t.to(HALVES[kind]) for t in batch(step, 0))
        losses.append(loss_fn(engine(x), y))
        engine.backward(losses[-1])
        engine.step()
    return [torch.stack(losses).detach(), safe_get_full_fp32_param(model[1].weight), model[1].running_var]


def _all_normed() -> list[list[Tensor]]:
    return [_normed(kind, stage) for kind in HALVES for stage in (1, 3)]


def test_batch_norm_runs_in_half_precision_with_statistics_in_fp32() -> None:
    model = nn.Sequential(*normed_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for step in range(STEPS):
        x, y = (t.float() for t in batch(step, 0))
        losses.append(loss_fn(model(x), y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    for found in on_ranks(1, _all_normed)[0]:
        for value, wanted in zip(found, [torch.stack(losses), model[1].weight, model[1].running_var], strict=True):
            torch.testing.assert_close(value.float(), wanted.detach(), rtol=0.02, atol=0.02)
        assert found[2].dtype is torch.float32


def _of_two_dtypes() -> None:
    """Check that DeepSpeed's ZeRO is refused for weights that it would convert, and no other weights are."""
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    mixed = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).double())
    groups = [{"params": list(layer.parameters())} for layer in mixed]
    for model, given, stage, name in (
        (nn.Linear(2, 2, dtype=torch.complex64), None, 1, "weight is torch.complex64"),
        (mixed, None, 2, "1.weight is torch.float64"),
        (mixed, groups, 3, "1.weight is torch.float64"),
        (mixed, groups, 1, None),
    ):
        optimizer = torch.optim.SGD(given or model.parameters(), lr=0.1)
        config["zero_optimization"] = {"stage": stage}
        with pytest.raises(ValueError, match=f"the weight {name}, but DeepSpeed's") if name else nullcontext():
            tds.initialize(model=model, optimizer=optimizer, config=config)


def test_weights_that_zero_would_convert_are_refused() -> None:
    on_ranks(1, _of_two_dtypes)


class Scaled(nn.Module):
    """A layer whose forward pass changes a buffer that the backward pass needs."""

    scale: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.scale.mul_(1.5)
        else:
            self.scale = self.scale * 1.5
        found: Tensor = self.linear(x) * self.scale
        return found


def scaled_layers(in_place: bool = False) -> list[nn.Module]:
    return [Scaled(in_place), *linears(2), Scaled(in_place)]


def _buffer_in_place() -> None:
    engine = build(lambda: scaled_layers(True), 2)
    engine.train_batch(steps(engine, 0))


def test_buffers_that_the_forward_pass_replaces_are_right_and_those_changed_in_place_raise_an_error() -> None:
    expected = plain(scaled_layers)
    for found in on_ranks(2, _train, scaled_layers, 2, "1f1b", {}):
        assert found == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RankFailure, match="inplace operation"):
        on_ranks(2, _buffer_in_place)


class Unusual(nn.Module):
    """A layer with weights of unusual layout: a scale without dimensions, a transposed and a channels_last weight."""

    def __init__(self, scale: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7)) if scale else 1.0
        self.transposed = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())
        self.pointwise = nn.Conv1d(2 * WIDTH, WIDTH, 1)
        self.pointwise.weight = nn.Parameter(torch.randn(WIDTH, 1, 2 * WIDTH).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.pointwise((x @ self.transposed.t()).tanh().unsqueeze(-1)).squeeze(-1) * self.scale
        return found


def unusual_layers(scale: bool = True) -> list[nn.Module]:
    return [*linears(1), Unusual(scale), *linears(1), Unusual(scale)]


def _unusual(stages: int, stage: int, sharded: bool) -> list[float]:
    """Train two replicas, of which the second starts with other weights; return the losses."""
    torch.manual_seed(3)
    scale = stage < 3
    layers = unusual_layers(scale)
    model: Any = nn.Sequential(*layers)
    if stages:
        how = {"seed_layers": True, "partition_method": "parameters"}
        model = tds.PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, **how)
    replicas = dist.get_world_size() // max(stages, 1)
    if dist.get_rank() % 2:
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), 1.0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "train_batch_size": 4 * replicas,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": LIMIT,
    }
    optimizer = tds.DistributedOptimizer(optimizer) if sharded else optimizer
    engine = tds.initialize(model=model, optimizer=optimizer, config=config)[0]
    if stages:
        data = ([tuple(t.float() for t in batch(step, 0))] for step in range(STEPS))
        return [engine.train_batch(iter(each)).item() for each in data]
    found = []
    for step in range(STEPS):
        x, y = (t.float() for t in batch(step, 0))
        loss = loss_fn(engine(x), y)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def plain_unusual(scale: bool = True) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(*unusual_layers(scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        x, y = (t.float() for t in batch(step, 0))
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("stages", "stage", "sharded"),
    [(0, 0, False), (0, 2, False), (0, 3, False), (2, 1, False), (2, 1, True)],
    ids=str,
)
def test_weights_of_unusual_layout_learn(stages: int, stage: int, sharded: bool) -> None:
    """Replicas start from the first one's weights and learn as plain torch does, with any memory layout of weights."""
    expected = plain_unusual(stage < 3)
    for found in on_ranks(2 * max(stages, 1), _unusual, stages, stage, sharded):
        assert found == pytest.approx(expected, rel=1e-5)


def _scale_under_zero_3() -> None:
    model = nn.Sequential(*unusual_layers())
    with pytest.raises(ValueError, match="1.scale"):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
        tds.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)


def test_zero_3_names_a_weight_without_dimensions() -> None:
    on_ranks(1, _scale_under_zero_3)


def _other_engine(kind: str) -> None:
    config: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    if kind == "hybrid_engine":
        config["hybrid_engine"] = {"enabled": True}
        model: Any = nn.Sequential(*linears(2))
    else:
        model = tds.DualPipeVModule(layers=linears(4), num_stages=1, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=kind):
        tds.initialize(model=model, optimizer=torch.optim.Adam(model.parameters()), config=config)
    plain_model = nn.Linear(2, 2)
    del config["train_batch_size"]
    config.pop("hybrid_engine", None)
    optimizer = torch.optim.Adam(plain_model.parameters())
    engine = tds.initialize(model=plain_model, optimizer=optimizer, config=config)[0]
    assert isinstance(engine, Engine)


def _closures() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True}
    for stage in (0, 1):
        model = nn.Linear(2, 2)
        optimizer: Any = torch.optim.LBFGS(model.parameters())
        optimizer = tds.DistributedOptimizer(optimizer) if stage else optimizer
        settings = config | {"zero_optimization": {"stage": stage}}
        for given in (optimizer, lambda _, built=optimizer: built):
            with pytest.raises(ValueError, match="LBFGS.*closure"):
                tds.initialize(model=model, optimizer=given, config=settings)
        named = settings | {"optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}}
        with pytest.raises(ValueError, match="LBFGS.*closure"):
            tds.initialize(model=model, model_parameters=model.parameters(), config=named)


def _foreign() -> None:
    config = {"train_micro_batch_size_per_gpu": 4}
    for stage in (0, 1):
        for wrap in (lambda inner: inner, tds.DistributedOptimizer, lambda inner: lambda _: inner):
            optimizer = wrap(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
            settings = config | {"zero_optimization": {"stage": stage}}
            with pytest.raises(ValueError, match="weight"):
                tds.initialize(model=nn.Linear(2, 2), optimizer=optimizer, config=settings)


def test_an_optimizer_of_another_model_is_refused() -> None:
    on_ranks(1, _foreign)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    on_ranks(1, _closures)


@pytest.mark.parametrize("kind", ["hybrid_engine", "DualPipeVModule"])
def test_deepspeeds_other_engines_are_refused(kind: str) -> None:
    on_ranks(1, _other_engine, kind)


def test_every_engine_that_deepspeed_may_choose_is_known() -> None:
    """All engine classes that the source of `deepspeed.initialize` calls are replaced or refused."""
    source = ast.parse(textwrap.dedent(inspect.getsource(deepspeed.initialize)))
    names = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
    chosen = {name for name in names if name.endswith("Engine")}
    assert {"DeepSpeedEngine", "PipelineEngine"} <= chosen <= set(engine_classes.engines())

"""Training equals plain torch or is refused in one sentence if a user replaces weights or layers between steps."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tds
from tds import optimizer_state
from tds.module_changes import KnownModel, ReplacedWeightError
from tests.support import on_ranks

WIDTH, MICROS, STEPS = 6, 2, 3
Change = Callable[[nn.Module], None]
mse = nn.functional.mse_loss


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def batches(step: int, dtype: torch.dtype, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    for _ in range(MICROS):
        x, y = torch.randn(2, 4, WIDTH, generator=generator)
        yield x.to(dtype), y.to(dtype)


def half_of_each(model: nn.Module) -> None:
    """Halve all weights by assigning `p.data = new`, as code for EMA and SWA does."""
    for p in model.parameters():
        p.data = p.detach() * 0.5


def one_weight(model: nn.Module) -> None:
    """Replace one matrix by `p.data = new` and leave the other weights of its bucket unchanged."""
    weight = next(p for p in model.parameters() if p.dim() == 2)
    weight.data = weight.detach() * 0.5 + 0.25


def transposed(model: nn.Module) -> None:
    """Replace a weight by a transposed view, which is not contiguous."""
    weight = next(p for p in model.parameters() if p.dim() == 2)
    weight.data = weight.data.clone().t()


def one_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def in_place(model: nn.Module) -> None:
    """Halve all weights in place; in bf16, the fp32 master weights must follow."""
    for p in model.parameters():
        p.data.mul_(0.5)


TAKEN_IN: list[Change] = [half_of_each, one_weight, transposed, one_vector, in_place]


def plain(change: Change, stage: slice, replicas: int) -> list[Tensor]:
    """Train in plain torch, with `change` after step 0; return the weights of the stage's layers after each step."""
    every = layers()
    model, found = nn.Sequential(*every), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 1:
            for at in (0, 2):  # change two layers at a time, as each of two stages does
                change(nn.Sequential(*every[at : at + 2]))
        optimizer.zero_grad()
        for replica in range(replicas):
            for x, y in batches(step, torch.float32, replica):
                torch.autograd.backward(mse(model(x), y) / MICROS / replicas)
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for layer in every[stage] for p in layer.parameters()]))
    return found


def _engine(stages: int, dtype: torch.dtype, own: bool = True, zero: int = 1) -> Any:
    net = tds.PipelineModule(layers(), num_stages=stages, loss_fn=mse, partition_method="uniform")
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROS, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero}, "pipeline": {"timeout": 60}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if dtype is torch.bfloat16:
        config |= {"bf16": {"enabled": True}}
    return tds.initialize(model=net, optimizer=tds.DistributedOptimizer(inner, 200) if own else inner, config=config)[0]


def _step(engine: Any, step: int, dtype: torch.dtype) -> None:
    engine.train_batch(batches(step, dtype, engine.grid.get_data_parallel_rank()))


def _taken_in(dtype: torch.dtype) -> None:
    rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (3e-2, 1e-2)
    for change in TAKEN_IN:
        engine = _engine(2, dtype)
        stage = slice(2 * engine.stage_id, 2 * engine.stage_id + 2)
        for step, expected in enumerate(plain(change, stage, replicas=2)):
            if step == 1:
                change(engine.module)
            _step(engine, step, dtype)
            found = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
            assert torch.allclose(found, expected, rtol, atol), change.__name__
            if step:  # the master weights, which checkpoints contain, must match, too
                exact = torch.cat([optimizer_state.get_weight(p).flatten() for p in engine.module.parameters()])
                torch.testing.assert_close(exact.to(dtype).float(), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_replaced_storage_is_taken_in(dtype: torch.dtype) -> None:
    on_ranks(4, _taken_in, dtype)


# --------------------------------------------------------------------- weights swapped temporarily


def _swapped(dtype: torch.dtype) -> None:
    """Check that replacing all weights between two steps and restoring them does not change training.

    In between, the master weights, which a checkpoint would contain, equal the replacements.
    """
    engine, same = _engine(1, dtype), _engine(1, dtype)
    for step in range(2):
        _step(engine, step, dtype)
        _step(same, step, dtype)
    before = [p.data for p in engine.module.parameters()]
    for p in engine.module.parameters():
        p.data = torch.full_like(p, 0.5)
    for p in engine.module.parameters():
        assert (optimizer_state.get_weight(p) == 0.5).all()
    for p, old in zip(engine.module.parameters(), before, strict=True):
        p.data = old
    for step in range(2, 4):
        _step(engine, step, dtype)
        _step(same, step, dtype)
    for p, q in zip(engine.module.parameters(), same.module.parameters(), strict=True):
        assert torch.equal(optimizer_state.get_weight(p), optimizer_state.get_weight(q))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_swapped_out_and_in_again_between_two_steps(dtype: torch.dtype) -> None:
    on_ranks(1, _swapped, dtype)


# ---------------------------------------------------------------------------- changes that are refused


def _assigned(module: nn.Module) -> None:
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def _converted(module: nn.Module) -> None:
    module.double()


def _new_layer(module: Any) -> None:
    module.add_module("0", nn.Linear(WIDTH, WIDTH))


def _shared(module: nn.Module) -> None:
    first, second = [p for p in module.parameters() if p.dim() == 2][:2]
    first.data = second.data


KEPT: list[Any] = []


def _kept(module: nn.Module) -> None:
    """Halve all weights while `KEPT` still refers to the old tensors, so that their memory cannot be reused."""
    KEPT.append([p.data for p in module.parameters()])
    half_of_each(module)


REFUSED: dict[str, tuple[Change, bool, int]] = {  # name -> (change, whether to use DistributedOptimizer, ZeRO stage)
    "assign=True": (_assigned, True, 1),
    "module.double()": (_converted, True, 1),
    "a new layer": (_new_layer, True, 1),
    "one storage for two": (_shared, True, 1),
    "an old storage that is kept": (_kept, True, 1),
    "assign=True, no ZeRO": (_assigned, False, 0),
    "p.data = new, DeepSpeed's ZeRO 1": (half_of_each, False, 1),
    "p.data = new, DeepSpeed's ZeRO 2": (half_of_each, False, 2),
}


def _refused(name: str) -> str:
    change, own, zero = REFUSED[name]
    if zero == 2:  # without a pipeline, since pipelines do not support ZeRO 2
        model = nn.Sequential(*layers())
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
        config |= {"zero_allow_untested_optimizer": True}
        engine = tds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
        change(engine.module)
        engine.backward(engine(torch.ones(4, WIDTH)).square().mean())
        with pytest.raises(ReplacedWeightError) as error:
            engine.step()
        return str(error.value)
    engine = _engine(1, torch.float32, own, zero)
    _step(engine, 0, torch.float32)
    change(engine.module)
    with pytest.raises(ReplacedWeightError) as error:
        _step(engine, 1, torch.float64 if name == "module.double()" else torch.float32)
    return str(error.value)


def _all_refused() -> dict[str, str]:
    return {name: _refused(name) for name in REFUSED}


def test_what_cannot_be_taken_in_is_named() -> None:
    for name, said in on_ranks(1, _all_refused)[0].items():
        assert re.search(r"the weight \d\.(weight|bias)", said), name


# ------------------------------------------------------- layers, gradients, replicas


def _layer_followed() -> None:
    """Check that a pipeline trains the new layer if the user replaces a layer, even a tied one, by another."""
    tied = tds.pipe.TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH)
    net = tds.PipelineModule([*layers()[:2], tied], num_stages=1, loss_fn=mse)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = tds.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 4})[0]
    new, end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    net.add_module("0", new)
    net.tied_modules["t"] = end
    optimizer.add_param_group({"params": [*new.parameters(), *end.parameters()]})
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    expected = mse(end(net.get_submodule("1")(new(x))), y)
    begun = new.weight.detach().clone()
    assert engine.train_batch(iter([(x, y)])).item() == pytest.approx(expected.item(), rel=1e-6)
    assert not torch.equal(new.weight, begun)


def test_a_replaced_layer_runs() -> None:
    on_ranks(1, _layer_followed)


def _function_of_a_replaced_layer() -> None:
    net = tds.PipelineModule(layers(), num_stages=1, loss_fn=mse)
    old = net.forward_funcs[0]
    net.forward_funcs[0] = lambda x: old(x)  # such as a compiled layer
    known = KnownModel(net)
    net.add_module("0", nn.Linear(WIDTH, WIDTH))
    for _ in range(2):
        with pytest.raises(ReplacedWeightError, match="the layer 0 was replaced"):
            known.adopt_new_layers()


def test_a_function_of_a_replaced_layer_is_refused_each_time() -> None:
    on_ranks(1, _function_of_a_replaced_layer)


def test_a_replaced_layer_runs_without_a_pipeline() -> None:
    tied = tds.pipe.TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH)
    model = tds.pipe.SequentialModule([*layers()[:2], tied, torch.tanh])
    new, end, x = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    model.add_module("0", new)
    model.tied_modules["t"] = end
    torch.testing.assert_close(model(x), torch.tanh(end(model.get_submodule("1")(new(x)))))


def _added_later() -> float:
    """Add a layer after the first step, without ZeRO; return the largest difference of its weight between replicas."""
    engine = _engine(1, torch.float32, own=False, zero=0)
    _step(engine, 0, torch.float32)
    new = nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(new.weight)
    nn.init.zeros_(new.bias)
    engine.module.add_module("3", new)
    engine.optimizer.add_param_group({"params": list(new.parameters())})
    _step(engine, 1, torch.float32)
    both = [torch.zeros_like(new.weight) for _ in range(2)]
    dist.all_gather(both, new.weight.detach())
    assert not torch.equal(new.weight, torch.ones_like(new.weight))
    return float((both[0] - both[1]).abs().max())


def test_a_weight_that_came_later_is_summed_over_replicas() -> None:
    assert on_ranks(2, _added_later) == [0.0, 0.0]


def _set_by_hand() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    ours = tds.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    ours.attach(model, dist.group.WORLD)
    model.weight.grad = torch.ones(2, 2)
    ours.finish()
    ours.clip(torch.ones(()), 0.0)
    ours.step()
    assert (model.weight == -dist.get_world_size()).all()
    ours.zero_grad()
    ours.finish()
    ours.clip(torch.ones(()), 0.0)
    model.weight.grad = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="weight"):
        ours.step()


def test_a_gradient_set_by_hand_counts_or_is_named() -> None:
    on_ranks(2, _set_by_hand)


def _thawed(zero: int, dtype: torch.dtype) -> list[str]:
    """Freeze, or unfreeze, a weight after the first step of DeepSpeed's optimizer; return the messages."""
    said = []
    for learns_first in (True, False):
        net = tds.PipelineModule(layers(), num_stages=1, loss_fn=mse)
        weight = next(net.parameters())
        weight.requires_grad_(learns_first)
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROS}
        config |= {"zero_optimization": {"stage": zero}, "bf16": {"enabled": dtype is torch.bfloat16}}
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]
        _step(engine, 0, dtype)
        engine.module.register_parameter("constant", nn.Parameter(torch.ones(1), requires_grad=False))  # is no error
        weight.requires_grad_(not learns_first)
        try:
            _step(engine, 1, dtype)
        except ReplacedWeightError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("zero", "dtype"), [(0, torch.float32), (1, torch.float32), (1, torch.bfloat16)])
def test_a_weight_that_deepspeeds_optimizer_would_not_freeze_is_named(zero: int, dtype: torch.dtype) -> None:
    (said,) = on_ranks(1, _thawed, zero, dtype)
    assert len(said) == (2 if zero else 0)
    assert all("0.weight" in each for each in said)


def _rows_frozen_by_a_hook() -> float:
    """Return by how much rows change whose gradients a hook sets to 0; the hook is made after the engine."""
    torch.manual_seed(3)
    first = nn.Linear(300, 300, bias=False)
    net = tds.PipelineModule([first, nn.Linear(300, WIDTH)], num_stages=1, loss_fn=mse)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "pipeline": {"timeout": 60}}
    engine = tds.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config)[0]
    before = first.weight.detach().clone()

    def freeze(p: Tensor) -> None:
        assert p.grad is not None
        p.grad[:150] = 0

    first.weight.register_post_accumulate_grad_hook(freeze)
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        batch = torch.randn(4, 300, generator=generator), torch.randn(4, WIDTH, generator=generator)
        engine.train_batch(iter([batch]))
    change = (first.weight.detach() - before).abs()
    assert change[150:].max() > 0
    return float(change[:150].max())


def test_a_hook_that_was_made_later_changes_gradients_before_they_are_reduced() -> None:
    assert on_ranks(2, _rows_frozen_by_a_hook) == [0.0, 0.0]

"""Clients that patch DeepSpeed's pipeline, as trainers with schedules and optimizer steps of their own do."""

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import on_ranks

from .common import MICROS, config, library, linears, mse, plain, samples, sgd, share, trained

MODULES = "engine", "pipe.engine", "pipe.module", "pipe.schedule", "pipe.p2p"
# Functions that read settings or build objects: they have no meaning of their own in a step.
SETTINGS = {
    *("gradient_accumulation_steps", "gradient_predivide_factor", "communication_data_type", "postscale_gradients"),
    *("is_deepcompile_enabled", "torch_autocast_enabled", "zero_optimization", "zero_grad", "__getattr__", "__init__"),
}


def _build(name: str, stages: int = 2, **more: Any) -> Any:
    lib = library(name)
    net = lib.PipelineModule(linears(), num_stages=stages, loss_fn=mse, partition_method="uniform")
    return lib.initialize(model=net, optimizer=sgd(net), config=config(**more))[0]


# ---------------------------------------------------------- every function that tds does not run


def _calls(engine: Any) -> set[tuple[str, str]]:
    """Train and evaluate; return (module, qualified name) of each function of DeepSpeed's pipeline that ran."""
    found = set()

    def note(frame: Any, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "").removeprefix("deepspeed.runtime.")
        if event == "call" and module in MODULES:
            found.add((module, frame.f_code.co_qualname))

    data = samples()
    sys.setprofile(note)
    engine.train_batch(data)
    engine.eval_batch(data)
    sys.setprofile(None)
    return found


def _calls_of_both() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return the functions that DeepSpeed's engine runs on this rank, and those that tds's engine runs."""
    found: dict[str, set[tuple[str, str]]] = {"stock": set(), "tds": set()}
    for name, calls in found.items():
        for stage in (0, 1):
            zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
            calls |= _calls(_build(name, clip=1.0, **zero))
    return found["stock"], found["tds"]


def _only_stock_runs() -> Iterator[tuple[Any, str]]:
    """Yield (class or module, name) of each function that DeepSpeed's engine runs and that of tds does not."""
    stock: set[tuple[str, str]] = set()
    ours: set[tuple[str, str]] = set()
    for rank in on_ranks(2, _calls_of_both):
        stock |= rank[0]
        ours |= rank[1]
    for module, path in sorted(stock - ours):
        place, _, name = path.rpartition(".")
        is_helper = path.startswith("_") or "<locals>" in path or name in SETTINGS
        if not is_helper:
            home = import_module(f"deepspeed.runtime.{module}")
            yield getattr(home, place) if place else home, name


def _wrapped(honest: Any) -> Any:
    """Return a function of this file that pretends to be DeepSpeed's, as functools.wraps makes it."""
    if isinstance(honest, property):
        return property(_wrapped(honest.fget))

    @functools.wraps(honest)
    def patch(*args: Any, **kwargs: Any) -> Any:
        return honest(*args, **kwargs)

    return patch


def test_each_function_that_only_deepspeeds_engine_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import tds
    from tds.patches import refuse_patches

    names = list(_only_stock_runs())
    assert len(names) > 50
    net = object.__new__(tds.PipelineModule)
    engine = object.__new__(tds.PipelineEngine)
    vars(engine)["pipeline_enable_backward_allreduce"] = True  # as DeepSpeed sets it when it builds an engine
    refuse_patches(engine, net, reduces=True)
    for place, name in names:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, _wrapped(vars(place)[name]))
            with pytest.raises(ValueError, match=name):
                refuse_patches(engine, net, reduces=True)


# ---------------------------------------------------------- where a patch may stand


def _own_forward(engine: Any, buffer_id: int) -> None:
    """Replace DeepSpeed's forward pass."""


def _stock_engine() -> Any:
    return import_module("deepspeed.runtime.pipe.engine").PipelineEngine


def _refusals() -> dict[str, str]:
    """Return what a client hears for a patch in each place, before `initialize` or between it and the first step."""
    from deepspeed.runtime.pipe import engine as module
    from deepspeed.runtime.pipe import schedule

    import tds

    class OwnSchedule(schedule.TrainSchedule):
        pass

    class OwnEngine(tds.PipelineEngine):
        def _exec_load_micro_batch(self, buffer_id: int) -> None:
            """Do nothing."""

    stock = module.PipelineEngine
    key = schedule.ForwardPass
    before: dict[str, Callable[[Any], None]] = {
        "map": lambda patch: patch.setitem(stock._INSTRUCTION_MAP, key, _own_forward),
        "class": lambda patch: patch.setattr(schedule, "TrainSchedule", OwnSchedule),
        "steps": lambda patch: patch.setattr(schedule.InferenceSchedule, "steps", lambda self: iter([])),
        "init": lambda patch: patch.setattr(schedule.TrainSchedule, "__init__", lambda *_: None),
        "layers": lambda patch: patch.setattr(tds.pipe.StockPipelineModule, "_partition_layers", _own_forward),
        "train_batch": lambda patch: patch.setattr(stock, "train_batch", _wrapped(stock.train_batch)),
        "partial": lambda patch: patch.setattr(stock, "_train_schedule", functools.partial(OwnSchedule, 1, 1, 0)),
        "module": lambda patch: patch.setattr(module, "schedule", sys.modules[__name__]),
        "subclass": lambda patch: patch.setattr(tds, "PipelineEngine", OwnEngine),
    }
    found = {}
    for name, apply in before.items():
        with pytest.MonkeyPatch.context() as patch:
            apply(patch)
            with pytest.raises(ValueError) as error:
                _build("tds", 1)
        found[name] = str(error.value)
    later = _build("tds", 1)
    with pytest.raises(ValueError) as error:
        later._aggregate_total_loss = lambda: torch.zeros(())
        later.train_batch(samples())
    found["instance"] = str(error.value)
    del later._aggregate_total_loss
    found["afterwards"] = repr(trained(later))
    return found


def test_a_patch_is_refused_by_name_wherever_it_stands() -> None:
    (found,) = on_ranks(1, _refusals)
    named = {
        "map": "_INSTRUCTION_MAP[ForwardPass]",
        "class": "schedule.TrainSchedule",
        "steps": "InferenceSchedule.steps",
        "init": "TrainSchedule.__init__",
        "layers": "PipelineModule._partition_layers",
        "train_batch": "PipelineEngine.train_batch",
        "partial": "_train_schedule",
        "module": "engine.schedule",
        "subclass": "_exec_load_micro_batch",
        "instance": "_aggregate_total_loss",
    }
    for place, name in named.items():
        assert name in found[place] and "\n" not in found[place]
    assert __name__ in found["map"]
    assert eval(found["afterwards"]) == pytest.approx(plain(linears()), rel=1e-5)


# ---------------------------------------------------------- patches that mean the same in tds


def _half_step(engine: Any, lr_kwargs: Any = None) -> None:
    """Halve the gradients, then step, like a client with an optimizer step of its own."""
    for weight in engine.module.parameters():
        weight.grad.mul_(0.5)
    engine._exec_optimizer_step(lr_kwargs)


def _with_half_steps(name: str) -> list[float]:
    from deepspeed.runtime.pipe import schedule

    _stock_engine()._INSTRUCTION_MAP[schedule.OptimizerStep] = _half_step
    return trained(_build(name))


@pytest.mark.parametrize("name", ["stock", "tds"])
def test_an_optimizer_step_of_the_clients(name: str) -> None:
    expected = plain(linears(), rate=0.25)
    for found in on_ranks(2, _with_half_steps, name):
        assert found == pytest.approx(expected, rel=1e-5)


def _own_mean(engine: Any) -> None:
    """Average gradients over the replicas, and halve them so that a test sees that this function ran."""
    for weight in engine.module.parameters():
        dist.all_reduce(weight.grad, group=engine.grid.get_data_parallel_group())
        weight.grad.div_(2 * engine.dp_world_size)


def _with_own_mean(name: str, place: str) -> list[float]:
    from deepspeed.runtime.pipe import schedule

    if place == "map":
        _stock_engine()._INSTRUCTION_MAP[schedule.ReduceGrads] = _own_mean
    else:
        base = import_module("deepspeed.runtime.engine").DeepSpeedEngine
        base = library(name).PipelineEngine if place == "class" else base
        base.allreduce_gradients = lambda self, **_: _own_mean(self)
    return trained(_build(name, 1), share())


@pytest.mark.parametrize("name", ["stock", "tds"])
@pytest.mark.parametrize("place", ["map", "class", "below"])
def test_a_reduction_of_the_clients(name: str, place: str) -> None:
    expected = plain(linears(), rate=0.25, micros=2 * MICROS)
    for found in on_ranks(2, _with_own_mean, name, place):
        assert found == pytest.approx(expected, rel=1e-5)


def _late() -> None:
    engine = _build("tds", 1)
    data = share()
    engine.train_batch(data)
    engine.pipeline_enable_backward_allreduce = False
    with pytest.raises(ValueError, match="pipeline_enable_backward_allreduce"):
        engine.train_batch(data)
    engine.pipeline_enable_backward_allreduce = True
    _stock_engine()._exec_reduce_grads = _own_mean
    with pytest.raises(ValueError, match="_exec_reduce_grads"):
        engine.train_batch(data)


def test_a_reduction_that_comes_too_late_is_refused() -> None:
    on_ranks(2, _late)

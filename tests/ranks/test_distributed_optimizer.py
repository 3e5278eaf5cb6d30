"""DistributedOptimizer shards optimizer states over replicas, and its steps equal those of the wrapped optimizer."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tds import optimizer_state
from tests.support import covering, on_ranks

from .nccl import nccl
from .test_reducer import Model, expected_sums

SETTINGS = {"weight_decay": 0.1, "lr": 0.05}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda groups: torch.optim.AdamW(groups, fused=True, **SETTINGS),
    "foreach": lambda groups: torch.optim.AdamW(groups, **SETTINGS),
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, **SETTINGS),
    "fused sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, fused=True, **SETTINGS),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1, **SETTINGS),
}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    learns = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in learns if p.dim() > 1]},
        {"params": [p for p in learns if p.dim() == 1], "weight_decay": 0.0},
    ]


def _clipped(grads: list[torch.Tensor], limit: float) -> float:
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    for g in grads:
        g *= min(1.0, limit / (norm + 1e-6))
    return norm


def _body(kind: str, dtype: torch.dtype, bucket_bytes: int | None) -> list[int]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    exact = copy.deepcopy(model).to(torch.promote_types(dtype, torch.float32))
    reference = OPTIMIZERS[kind](_groups(exact))
    ours = tds.DistributedOptimizer(OPTIMIZERS[kind](_groups(model)), bucket_bytes)
    ours.attach(model, dist.group.WORLD, apart=[model.last.weight])
    reduced, real = [], ours.buckets[0].__class__.reduce
    ours.buckets[0].__class__.reduce = lambda bucket: (reduced.append(bucket), real(bucket))[1]  # type: ignore[method-assign]
    during = []
    for step in range(4):
        inputs = [torch.randn(4, 6).to(dtype) + dist.get_rank() for _ in range(2)]
        for name, grad in expected_sums(model, inputs).items():  # The sums have the dtype of `model`.
            exact.get_parameter(name).grad = grad.to(exact.first.weight.dtype)
        before = len(reduced)
        for micro, x in enumerate(inputs):
            if micro == 1:
                ours.arm()
            model(x).backward()
        during.append(len(reduced) - before)
        ours.finish()
        norm = ours.squared_norm(0, torch.device("cpu"))
        dist.all_reduce(norm)
        limit = 0.0 if step == 3 else 0.5
        if limit:
            expected = _clipped([p.grad for p in exact.parameters() if p.grad is not None], limit)
            assert norm.sqrt().item() == pytest.approx(expected, rel=1e-6 if dtype != torch.bfloat16 else 1e-2)
        ours.clip(norm.sqrt(), limit)
        ours.step()
        ours.zero_grad()
        reference.step()
        for name, p in model.named_parameters():
            want = exact.get_parameter(name)
            if p.requires_grad:
                tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
                torch.testing.assert_close(optimizer_state.get_weight(p), want.detach(), **tolerance, msg=name)
                assert torch.equal(p, optimizer_state.get_weight(p).to(dtype))
            assert p.grad is None
    ours.buckets[0].__class__.reduce = real  # type: ignore[method-assign]
    return during


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_steps_as_the_optimizer_inside_does(kind: str) -> None:
    """Steps equal those of the wrapped optimizer with any bucket size, even for weights that few or no ranks use."""
    on_ranks(2, _body, kind, torch.float32, None)
    for during in on_ranks(3, _body, kind, torch.float32, 8):
        # Step 0 only counts the gradients of each weight. Later steps reduce buckets during the backward pass.
        assert during[0] == 0 and during[-1] >= 3


def test_in_bf16_it_steps_in_fp32() -> None:
    on_ranks(2, _body, "fused", torch.bfloat16, 8)
    on_ranks(1, _body, "fused", torch.bfloat16, None)


def _many_buckets() -> tuple[int, int]:
    """Take two steps of a model with a bucket per layer; return the number of buckets, and calls of AdamW per step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(20)))
    exact = copy.deepcopy(model)
    inside, reference = (torch.optim.AdamW(each.parameters(), **SETTINGS) for each in (model, exact))
    calls, real = 0, inside.step

    def counted() -> None:
        nonlocal calls
        calls += 1
        real()

    inside.step = counted  # type: ignore[method-assign, assignment]
    ours = tds.DistributedOptimizer(inside, 4 * 36)
    ours.attach(model, dist.group.WORLD)
    for _ in range(2):
        x = torch.randn(4, 6)
        model(x).square().sum().backward()
        (exact(x).square().sum() * dist.get_world_size()).backward()
        ours.finish()
        norm = ours.squared_norm(0, torch.device("cpu"))
        dist.all_reduce(norm)
        ours.clip(norm.sqrt(), 0.0)
        ours.step()
        reference.step()
        ours.zero_grad()
        reference.zero_grad()
    for p, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p, want)
    return len(ours.buckets), calls // 2


def test_a_step_calls_the_optimizer_a_few_times_for_many_buckets() -> None:
    """A step updates 20 buckets with at most 8 calls of the optimizer, since each call takes host time."""
    for buckets, calls in on_ranks(2, _many_buckets):
        assert buckets == 20 and calls == 7


def _late() -> None:
    with nccl("eager"):
        _body("fused", torch.float32, 8)


def test_messages_that_complete_late() -> None:
    """Weights are right even if collectives complete long after their call, as on an accelerator."""
    on_ranks(2, _late)


def _not_finite(kind: str) -> None:
    model = nn.Linear(4, 4)
    ours = tds.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
    ours.attach(model, dist.group.WORLD)
    found = []
    for value in (1.0, math.nan if dist.get_rank() else 1.0, 1.0):
        ours.arm()
        (model(torch.ones(2, 4)).sum() * value).backward()
        ours.finish()
        norm = ours.squared_norm(0, torch.device("cpu"))
        dist.all_reduce(norm)
        before = model.weight.clone()
        ours.clip(norm.sqrt(), 1.0)
        ours.step()
        ours.zero_grad()
        found.append(torch.equal(model.weight, before))
    assert found == [False, True, False]
    steps = {int(state["step"]) for state in ours.state.values() if "step" in state}
    assert steps <= {2}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str) -> None:
    on_ranks(2, _not_finite, kind)


LAYERS = [tds.pipe.TiedLayerSpec("w", nn.Linear, 6, 6), *[tds.pipe.LayerSpec(nn.Linear, 6, 6) for _ in range(4)],
          tds.pipe.TiedLayerSpec("w", nn.Linear, 6, 6)]  # fmt: skip


def _config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 1},
        **more,
    }


def _engine(own: bool, schedule: str, stages: int, **more: Any) -> Any:
    torch.manual_seed(0)
    chunks = 2 if schedule == "interleaved" else 1
    net = tds.PipelineModule(
        LAYERS, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform", chunks=chunks
    )
    groups = [{"params": list(net.parameters())}]
    inner = torch.optim.AdamW(groups, fused=True, **SETTINGS)
    optimizer = tds.DistributedOptimizer(inner, 8) if own else inner
    config = _config(**more, pipeline={"schedule": schedule, "timeout": 60})
    return tds.initialize(model=net, optimizer=optimizer, config=config)[0]


def _losses(engine: Any, steps: int = 4) -> list[float]:
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    replica = engine.grid.get_data_parallel_rank()
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + replica)
        batches = [tuple(torch.randn(2, 6, generator=generator).to(dtype) for _ in "xy") for _ in range(4)]
        losses.append(engine.train_batch(iter(batches)).item())
    return losses


def _as_deepspeed(schedule: str, stages: int, more: dict[str, Any]) -> None:
    theirs, ours = _engine(False, schedule, stages, **more), _engine(True, schedule, stages, **more)
    left: list[bool] = []
    bucket = ours.optimizer.buckets[0].__class__
    real = bucket.reduce
    bucket.reduce = lambda self: (left.append(True), real(self))[1]  # type: ignore[method-assign]
    finish = ours.optimizer.finish
    ours.optimizer.finish = lambda: (left.append(False), finish())[1]
    expected = _losses(theirs)
    assert _losses(ours) == pytest.approx(expected, rel=2e-2 if more else 1e-6)
    norms = [float(engine.get_global_grad_norm()) for engine in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2 if more else 1e-5)
    bucket.reduce = real  # type: ignore[method-assign]
    assert left[left.index(False) + 1 :].index(False) >= 2  # the second step reduces buckets before `finish`
    for weight in ours.module.parameters():
        told = [torch.zeros_like(weight) for _ in range(dist.get_world_size(ours._replicas))]
        dist.all_gather(told, weight.detach(), group=ours._replicas)
        assert all(torch.equal(each, weight) for each in told)


PIPELINES = [("1f1b", 4, 2), ("interleaved", 4, 2), ("zb-h1", 4, 2), ("1f1b", 6, 2)]


@pytest.mark.parametrize("schedule, ranks, stages", covering(PIPELINES, PIPELINES[1:].__contains__, several=True))
def test_under_a_pipeline_it_trains_as_deepspeed_does(schedule: str, ranks: int, stages: int) -> None:
    """Losses and gradient norms equal DeepSpeed's ZeRO 1 in a pipeline whose first and last stages share a weight."""
    on_ranks(ranks, _as_deepspeed, schedule, stages, {})


BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}


def test_under_a_pipeline_in_bf16() -> None:
    on_ranks(4, _as_deepspeed, "1f1b", 2, BF16)


def _saved(folder: str) -> None:
    whole = _losses(_engine(True, "1f1b", 2), 6)
    first = _engine(True, "1f1b", 2)
    found = _losses(first, 4)
    first.save_checkpoint(folder)
    second = _engine(True, "1f1b", 2)
    _losses(second, 1)
    second.load_checkpoint(folder)
    assert found == whole[:4]
    assert second.global_steps == 4
    dtype_of = {p.dtype for p in second.module.parameters()}
    assert dtype_of == {torch.float32}
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first.optimizer.buckets, second.optimizer.buckets, strict=True):
        for key, value in first.optimizer.state[a.share].items():
            assert torch.equal(value, second.optimizer.state[b.share][key])
    assert _losses(first, 2) == _losses(second, 2)


def test_deepspeeds_checkpoints(tmp_path: Path) -> None:
    on_ranks(4, _saved, str(tmp_path))


def _weights_only(folder: str) -> None:
    """Check that loading only the weights of a checkpoint also sets the fp32 master weights."""
    first = _engine(True, "1f1b", 2, **BF16)
    _losses(first, 2)
    first.save_checkpoint(folder)
    for only in ({"load_module_only": True}, {"load_optimizer_states": False}):
        second = _engine(True, "1f1b", 2, **BF16)
        _losses(second, 1)
        second.load_checkpoint(folder, **only)
        for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(optimizer_state.get_weight(b).bfloat16(), a)


def test_checkpoints_of_which_only_weights_are_loaded(tmp_path: Path) -> None:
    on_ranks(4, _weights_only, str(tmp_path))


def _skips(scheduled: bool) -> list[int]:
    """Train four steps, two of them with NaN; return `skipped_steps` at steps without one, then after it is set."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(inner, 1) if scheduled else None
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    ours = tds.DistributedOptimizer(inner)
    given = ours if scheduled else lambda _: ours  # a function may build it
    engine: Any = tds.initialize(model=model, optimizer=given, lr_scheduler=rates, config=config)[0]
    found = []
    for value in (1.0, math.nan, math.nan, 1.0):
        ours.arm()
        engine.backward(engine(torch.tensor([[value, 1.0]])).sum())
        ours.finish()
        squared = ours.squared_norm(0, torch.device("cpu"))
        dist.all_reduce(squared)
        ours.clip(squared.sqrt(), 1.0)
        engine.step()
        if value == 1.0:  # two skips are counted before the host reads them
            found.append(engine.skipped_steps)
    engine.skipped_steps = 7
    return [*found, engine.skipped_steps]


@pytest.mark.parametrize("scheduled", [False, True])
def test_skipped_steps_are_counted_with_and_without_a_scheduler(scheduled: bool) -> None:
    assert on_ranks(2, _skips, scheduled) == [[0, 2, 7]] * 2


def _looked_at() -> None:
    """Check that DeepSpeed's safe_get_full_grad and safe_get_full_optimizer_state work on every replica."""
    torch.manual_seed(0)
    model = Model()
    ours = tds.DistributedOptimizer(OPTIMIZERS["fused"](_groups(model)), 8)
    ours.attach(model, dist.group.WORLD)
    x = torch.randn(4, 6) + dist.get_rank()
    expected = expected_sums(model, [x])
    with pytest.raises(RuntimeError, match=r"call finish\(\), clip\(\) and then step\(\)"):
        ours.step()
    ours.arm()
    model(x).backward()
    ours.finish()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(tds.utils.safe_get_full_grad(p), expected[name])
    ours.clip(torch.tensor(1.0), 0.0)
    ours.step()
    for name, p in model.named_parameters():
        if p.requires_grad:
            found = tds.utils.safe_get_full_optimizer_state(p, "exp_avg")
            torch.testing.assert_close(found, 0.1 * expected[name])
    ours.zero_grad()
    assert not any(bucket.grads.untyped_storage().nbytes() for bucket in ours.buckets)  # freed for activations
    if dist.get_rank() == 0:  # the owner of these weights
        with pytest.raises(ValueError, match="immediately after backward"):
            tds.utils.safe_get_full_grad(next(p for p in model.parameters() if p.requires_grad))


def test_deepspeeds_functions_look_into_it() -> None:
    on_ranks(2, _looked_at)


def _not_of_the_model() -> list[str]:
    told = []
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(ValueError, match="two weights in one memory"):
        tds.DistributedOptimizer(torch.optim.SGD(tied.parameters())).attach(tied, dist.group.WORLD)
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    for inner in (torch.optim.AdamW([*model.parameters(), other]), used):
        with pytest.raises(ValueError) as error:
            tds.DistributedOptimizer(inner).attach(model, dist.group.WORLD)
        told.append(str(error.value))
    return told


def test_weights_that_would_not_learn_are_refused() -> None:
    strange, used = on_ranks(1, _not_of_the_model)[0]
    assert strange.endswith("has weights that are not in the model: register them in it")
    assert used.endswith("already has states of unsharded weights: wrap it before its first step")


def _refused() -> list[str]:
    told = []
    for more in (
        {"zero_optimization": {"stage": 0}},
        {"fp16": {"enabled": True}},
        {"checkpoint": {"load_universal": True}},
    ):
        with pytest.raises(ValueError) as error:
            _engine(True, "1f1b", 1, **more)
        told.append(str(error.value))
    return told


def test_what_it_cannot_do_is_refused() -> None:
    stage, half, universal = on_ranks(1, _refused)[0]
    assert stage.startswith("tds.DistributedOptimizer needs ZeRO stage 1, not 0: set")
    assert half.startswith("tds.DistributedOptimizer has no loss scale for fp16: use bf16 or fp32")
    assert universal.startswith("tds.DistributedOptimizer cannot load universal checkpoints: leave")


def _changed(learns_first: bool) -> str:
    torch.manual_seed(0)
    net = tds.PipelineModule([nn.Linear(6, 6), nn.Linear(6, 6)], num_stages=1, loss_fn=nn.functional.mse_loss)
    first = next(net.parameters())
    first.requires_grad_(learns_first)
    optimizer = tds.DistributedOptimizer(torch.optim.AdamW(net.parameters(), lr=0.05))
    engine = tds.initialize(model=net, optimizer=optimizer, config=_config())[0]
    _losses(engine, 2)
    first.requires_grad_(not learns_first)
    try:
        _losses(engine, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_weights_frozen_or_set_free_later_are_refused() -> None:
    for learns_first, what in ((True, "frozen"), (False, "unfrozen")):
        for said in on_ranks(2, _changed, learns_first):
            assert said.startswith(f"1 weights, the first of shape (6, 6), were {what} after tds.initialize()")


def _steps_with_probes(own: bool, probes: bool) -> Tensor:
    """Return the weights after two steps, between which another backward pass may run, whose gradients are dropped."""
    torch.manual_seed(0)
    net = tds.PipelineModule([nn.Linear(6, 6), nn.Linear(6, 6)], num_stages=1, loss_fn=nn.functional.mse_loss)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    config = _config()
    if own:
        optimizer = tds.DistributedOptimizer(optimizer)
    else:
        config["zero_optimization"] = {"stage": 0}
    engine = tds.initialize(model=net, optimizer=optimizer, config=config)[0]
    _losses(engine, 1)
    if probes:
        (1000 * engine.module(torch.ones(4, 6)).sum()).backward()
        engine.zero_grad()
    _losses(engine, 1)
    with pytest.raises(RuntimeError, match="add_param_group") if own else nullcontext():
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("own", [False, True])
def test_the_engine_drops_the_gradients_of_other_backward_passes(own: bool) -> None:
    (plain,) = on_ranks(1, _steps_with_probes, own, False)
    (probed,) = on_ranks(1, _steps_with_probes, own, True)
    assert torch.equal(plain, probed)

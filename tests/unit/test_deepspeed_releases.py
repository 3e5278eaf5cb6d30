"""Unsupported DeepSpeed releases are refused; TDS_ANY_DEEPSPEED=1 allows them if a test of gradients succeeds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tds
from tds import measure
from tds._deepspeed import DeepSpeedEngine, Zero12Optimizer, refuse_other_releases
from tests.sentences import SENTENCES
from tests.support import on_ranks


@pytest.mark.parametrize("release", ["0.17.0", "0.18.9", "0.20.0", "1.0"])
def test_another_release_is_refused_unless_the_user_insists(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tds._ds.__version__", release)
    for start in (tds.initialize, tds.init_distributed):
        with pytest.raises(tds.UnsupportedDeepSpeed, match=SENTENCES["deepspeed_0_19_0_20_tds"]):
            start()
    monkeypatch.setenv("TDS_ANY_DEEPSPEED", "1")
    assert release in str(refuse_other_releases(release))


@pytest.mark.parametrize("release", ["0.19.0", "0.19.8", "0.19.9+abc123"])
def test_a_release_of_the_range_is_taken(release: str) -> None:
    assert refuse_other_releases(release) is None


def _engine(**config: Any) -> Any:
    model = nn.Linear(4, 4)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = tds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings | config
    )
    return engine


def _times(factor: float) -> Callable[[Any], Any]:
    """Return a replacement for `DeepSpeedEngine.backward` that multiplies gradients by `factor`."""
    before = DeepSpeedEngine.backward
    return lambda self, loss, *args, **more: before(self, loss * factor, *args, **more)


def _measured(zero: int, precision: str, fault: str) -> list[str]:
    """Inject a fault into DeepSpeed; return "right" or "wrong" for gradients without and with a pipeline."""
    patch = pytest.MonkeyPatch()
    measure._verified.clear()
    if fault == "accumulation":  # a bug of DeepSpeed 0.17.0 to 0.18.2
        patch.setattr(DeepSpeedEngine, "backward", _times(2))
    elif fault == "replicas":
        patch.setattr(Zero12Optimizer, "gradient_average", property(lambda _: False, lambda *_: None), raising=False)
    elif fault == "loss scale":
        patch.setattr(Zero12Optimizer, "scale_if_loss", lambda self, loss: loss)
        patch.setattr(DeepSpeedEngine, "scale", lambda self, loss: loss)
    more = {} if precision == "fp32" else {precision: {"enabled": True}}
    found = []
    try:
        engine = _engine(zero_optimization={"stage": zero}, **more)
        replicas = torch.distributed.get_world_size()
        for pipeline, factor in ((False, lambda micros: micros * replicas), (True, lambda micros: replicas)):
            if pipeline and zero > 1:
                continue
            try:
                measure.check_factor(engine, factor, pipeline=pipeline)
                found.append("right")
            except ValueError as error:
                assert "gradients" in str(error)
                found.append("wrong")
    finally:
        patch.undo()
        measure._verified.clear()
    return found


def _all_measured(cases: list[tuple[int, str, str]]) -> list[list[str]]:
    return [_measured(*case) for case in cases]


def test_a_wrong_factor_is_measured_and_a_right_one_passes() -> None:
    expected = {
        (0, "fp32", ""): ["right", "right"],
        (1, "fp32", ""): ["right", "right"],
        (2, "bf16", ""): ["right"],
        (3, "fp32", ""): ["right"],
        (0, "bf16", ""): ["right", "right"],
        (1, "fp16", ""): ["right", "right"],
        (0, "fp32", "accumulation"): ["wrong", "right"],  # a pipeline does not call DeepSpeedEngine.backward
        (2, "fp32", "accumulation"): ["wrong"],
        (1, "fp32", "replicas"): ["wrong", "wrong"],
        (1, "fp16", "loss scale"): ["wrong", "wrong"],
    }
    for found in on_ranks(2, _all_measured, list(expected)):
        assert dict(zip(expected, found, strict=True)) == expected


def _summed() -> str:
    layers = [nn.Linear(4, 4), nn.Linear(4, 1)]
    model = tds.PipelineModule(layers, loss_fn=lambda out, labels: out.mean(), num_stages=1)
    engine, *_ = tds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_allreduce_op": "sum", "gradient_clipping": 0.0},
    )  # fmt: skip
    before = layers[1].bias.detach().clone()
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 1))]))
    return f"{(before - layers[1].bias.detach()).item():.4f}"


def test_a_sum_over_replicas_that_the_user_asks_for_is_a_sum_under_a_pipeline() -> None:
    """With gradient_allreduce_op "sum", two replicas' gradients of 1 change a bias by 0.2 at a learning rate of 0.1."""
    assert on_ranks(2, _summed) == ["0.2000", "0.2000"]


def test_fp16_without_zero_is_refused_where_deepspeed_undoes_a_scale_that_it_has_not_applied() -> None:
    (found,) = on_ranks(1, _fp16_without_zero)
    assert "gradients" in found


def _fp16_without_zero() -> str:
    try:
        _engine(fp16={"enabled": True})
    except ValueError as error:
        return str(error)
    return "taken"

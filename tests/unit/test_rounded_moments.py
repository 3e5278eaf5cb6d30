"""Adam's moments in bf16: the steps of a reference in fp64 whose moments are rounded by hand, estimates, refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.config import Config, ModelConfig, OptimConfig
from megatron.config.ds_config import resolve
from megatron.estimate.per_rank import state_bytes
from megatron.estimate.sizes import count_layers, layers_of
from megatron.optim import rounded_adamw

ROUNDED = OptimConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", adam_beta2=0.95)
BOTH = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def _strided(weight: Tensor) -> Tensor:
    return weight.T.clone().T


@pytest.mark.parametrize("dtypes", [BOTH, {"exp_avg": torch.bfloat16}, {"exp_avg_sq": torch.bfloat16}])
@pytest.mark.parametrize("layout", [Tensor.contiguous, _strided])
def test_only_stored_moments_are_rounded(
    dtypes: dict[str, torch.dtype], layout: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounded_adamw, "CHUNK_ELEMENTS", 7)
    torch.manual_seed(0)
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.95, 1e-8, 0.1
    weight = torch.nn.Parameter(layout(torch.randn(5, 9)))  # type: ignore[operator]
    groups = [{"params": [weight], "weight_decay": decay}]
    optimizer = rounded_adamw.RoundedAdamW(groups, dtypes, lr=lr, betas=(beta1, beta2), eps=eps)
    expected = weight.detach().double()
    stored = {name: torch.zeros_like(weight, dtype=dtypes.get(name)) for name in BOTH}
    for t in range(1, 20):
        weight.grad = torch.randn_like(weight)
        grad = weight.grad.double()
        optimizer.step()
        exp_avg = beta1 * stored["exp_avg"].double() + (1 - beta1) * grad
        exp_avg_sq = beta2 * stored["exp_avg_sq"].double() + (1 - beta2) * grad**2
        denominator = (exp_avg_sq / (1 - beta2**t)).sqrt() + eps
        expected = expected * (1 - lr * decay) - lr * exp_avg / (1 - beta1**t) / denominator
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=2e-6)
        state = optimizer.state[weight]
        for name, exact in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            assert state[name].dtype == dtypes.get(name, torch.float32)
            # fp32 may fall on the other side of a tie than fp64, so a bf16 number may differ by its last bit.
            rounded = exact.to(state[name].dtype)
            tolerance = 2**-7 if name in dtypes else 1e-6
            torch.testing.assert_close(state[name], rounded, rtol=tolerance, atol=1e-7)
            assert (state[name] == rounded).float().mean() > 0.9 or name not in dtypes
            stored[name] = state[name].clone()
        assert int(state["step"]) == t


def test_a_step_with_a_nan_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = rounded_adamw.RoundedAdamW([{"params": [weight]}], BOTH, lr=1e-2)
    weight.grad = torch.ones(3)
    optimizer.step()
    before = [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]
    weight.grad = torch.tensor([1.0, float("nan"), 1.0])
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(map(torch.equal, before, [weight.detach(), *optimizer.state[weight].values()]))


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_the_memory_estimate_has_two_bytes_a_moment(optimizer: str) -> None:
    exact = Config(model=ModelConfig(vocab_size=1000), optim=OptimConfig(optimizer=optimizer))
    rounded = replace(exact, optim=replace(ROUNDED, optimizer=optimizer))
    count = count_layers(layers_of(exact), exact)
    adams = count.held - count.hidden if optimizer == "muon" else count.held
    found = [state_bytes(count, config, resolve(config, 1, False), 1)[2] for config in (exact, rounded)]
    assert found[0] - found[1] == 4 * adams


@pytest.mark.parametrize(
    ("model", "optim", "flag"),
    [
        ({}, {"optimizer": "sgd"}, "--optimizer"),
        ({"kernels": "apex"}, {}, "--kernels"),
        ({}, {"adam_beta2": 0.999}, "--adam-beta2"),
    ],
)
def test_refusals_name_the_flag(model: dict[str, str], optim: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        Config(model=ModelConfig(**model), optim=replace(ROUNDED, **optim))  # type: ignore[arg-type]

"""The gradient norm of a full or sharded weight equals the norm in fp64; clipping scales gradients of every dtype."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import fused_adam
from torch import Tensor, nn

from tds.clip import clip_by_norm, local_squared_norm
from tds.optimizers import clip_in_step


def norm_of(gradients: list[Tensor]) -> float:
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return local_squared_norm(parameters, 0, torch.device("cpu")).sqrt().item()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 5_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_any_size_is_that_of_fp64(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gradient = (torch.randn(size) * 1e-3 + 0.02 * (torch.rand(size) < 0.01)).to(dtype)
    # The tolerance allows for rounding: tds.clip sums rows of 4096 elements in fp32.
    assert norm_of([gradient]) == pytest.approx(gradient.double().norm().item(), rel=1e-6)


def test_shards_of_a_weight_have_the_norm_of_the_weight() -> None:
    torch.manual_seed(1)
    gradient = torch.randn(30_000, 100) * 1e-3
    whole = norm_of([gradient])
    for ranks in (2, 3, 8):
        parts = [norm_of([part]) for part in gradient.chunk(ranks)]
        # The tolerance allows for rounding: tds.clip sums rows of 4096 elements in fp32.
        assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 5000, -1])
def test_a_value_that_is_not_finite_shows(bad: float, place: int) -> None:
    gradient = torch.ones(10_000)
    gradient[place] = bad
    assert not torch.tensor(norm_of([gradient])).isfinite()


@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16, torch.float32])
def test_clipping_scales_every_dtype_alike(first: torch.dtype) -> None:
    """Clipping multiplies gradients of all dtypes by the same factor.

    The factor is 2e-13, which fp16 would round to 0. One gradient has the dtype `first`, in one case fp16.
    """
    gradients = [torch.ones(4, dtype=first), torch.full((4,), 1.5e10), torch.full((4,), 1.5e10, dtype=torch.float64)]
    parameters = []
    for gradient in gradients:
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient.clone()
    norm = local_squared_norm(parameters, 0, torch.device("cpu")).sqrt()
    clip_by_norm(parameters, norm, 1e-2)
    factor = 1e-2 / norm.item()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        rel = 1e-6 if gradient.dtype != first or first == torch.float32 else 1e-2  # tolerates 16-bit rounding
        torch.testing.assert_close(parameter.grad.double(), gradient.double() * factor, rtol=rel, atol=1e-7)


def test_weights_without_gradients_are_clipped_to_nothing() -> None:
    """A stage whose weights have no gradient takes part in the step."""
    weight = nn.Parameter(torch.ones(2))
    clip_by_norm([weight], torch.tensor(3.0), 1.0)
    clip_by_norm([], torch.tensor(3.0), 1.0)
    assert weight.grad is None


def multi_tensor_adam(
    _: int, __: Any, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    adam_w_mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Step AdamW as DeepSpeed's CUDA kernel of this name does."""
    for grad, weight, exp_avg, exp_avg_sq in zip(*lists, strict=True):
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.lerp_(grad.square(), 1 - beta2)
        root = (exp_avg_sq / (1 - beta2**step)).sqrt()
        weight.sub_(lr * (exp_avg / (1 - beta1**step) / (root + eps) + weight_decay * weight))


def deepspeeds_muon(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon for weights that are vectors, so it steps them by AdamW."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    group = {"params": weights, "use_muon": False, "lr": 0.1, "eps": 1.0, "betas": (0.9, 0.999), "weight_decay": 0.01}
    return MuonWithAuxAdam([group])  # type: ignore[no-any-return]


STEPPERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.1, eps=1.0),  # a large eps makes updates depend on clipping
    "fused adam": lambda weights: torch.optim.AdamW(weights, lr=0.1, eps=1.0, fused=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "fused sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "DeepSpeed's adam": lambda weights: fused_adam.FusedAdam(weights, lr=0.1, eps=1.0, weight_decay=0.01),
    "DeepSpeed's muon, which contains adam": deepspeeds_muon,
}


STEPS = [*product(STEPPERS, (torch.float32, torch.float64))]
STEPS.remove(("DeepSpeed's adam", torch.float64))  # its kernel has no fp64


@pytest.mark.parametrize(("name", "dtype"), STEPS)
def test_steps_with_clipping_are_those_of_torch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, of which one is clipped, one is too short to be clipped, and one has no limit.

    At the beginning and before the last step, steps with a gradient that is not finite change nothing.
    """
    kernels = SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    monkeypatch.setattr(fused_adam.FusedAdamBuilder, "load", lambda _: kernels)
    torch.manual_seed(3)
    start = torch.randn(70_000, dtype=dtype)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    our_steps, their_steps = STEPPERS[name]([ours]), STEPPERS[name.split()[-1]]([theirs])
    nan = float("nan")
    for scale, limit in ((nan, 0.5), (nan, 0.5), (1.0, 0.5), (1e-4, 0.5), (nan, 0.5), (1.0, 0.0)):
        gradient = torch.randn_like(start) * scale
        ours.grad = gradient.clone()
        clip_in_step(our_steps, [ours.grad], torch.linalg.vector_norm(gradient), limit)
        our_steps.step()
        if scale == scale:
            theirs.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_([theirs], limit or float("inf"))
            their_steps.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=tolerance, atol=tolerance)

"""Functions that CUDA runs compiled, with inputs, and their comparison with the eager definitions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.fused import Fused, compiled
from megatron.model.mixture import weighted_sum
from megatron.mpu import cross_entropy
from tds import buckets

TOKENS, VOCAB, PADDED = 7, 13, 16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _gradient_inputs() -> list[Tensor]:
    values = draw(TOKENS, PADDED).mul(3).bfloat16()[:, :VOCAB]
    target = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    factor = draw(TOKENS, seed=3).float()
    return [values, values.float().logsumexp(-1), target, factor, -factor, factor * 0.01]


def changed_weights() -> list[Tensor]:
    exact = draw(1000).float()
    seen = exact.bfloat16()
    seen[3], seen[500], seen[999] = 7.0, float("inf"), -seen[999]
    return [exact, seen]


def _weighted() -> list[Tensor]:
    weights, outputs = draw(TOKENS, 1, 2, seed=4).bfloat16(), draw(TOKENS, 2, 8, seed=5).bfloat16()
    return [weights.requires_grad_(), outputs.requires_grad_()]


FUNCTIONS: dict[str, tuple[Fused, Callable[[], list[Any]]]] = {
    "log_sum_exp": (cross_entropy.log_sum_exp, lambda: [_gradient_inputs()[0], torch.float32]),
    "write_gradient": (cross_entropy.write_gradient, _gradient_inputs),
    "adopt_changes": (Fused(buckets.adopt, buckets.adopt_in_slices), changed_weights),
    "weighted_sum": (weighted_sum, _weighted),
}


def _placed(x: Any, device: torch.device) -> Any:
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def compiled_equals_eager(name: str, device: torch.device) -> None:
    """Check that outputs, overwritten inputs and gradients are equal up to one rounding to their dtype."""
    function, inputs = FUNCTIONS[name]
    found = []
    for run in (compiled(function.plain), function.eager):
        given = [
            x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs()
        ]
        out = run(*given)
        if out.requires_grad:
            out.float().square().sum().backward()
        tensors = [x for x in given if isinstance(x, Tensor)]
        found.append([out, *tensors, *(x.grad for x in tensors if x.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)

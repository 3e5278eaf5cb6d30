"""Functions that CUDA runs compiled, with inputs, and their comparison with the eager definitions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.fused import Fused, compile_pointwise
from megatron.model import mixture
from megatron.mpu import fused_cross_entropy
from tds import buckets

TOKENS, VOCAB, PADDED = 7, 13, 16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _gradient_inputs() -> list[Tensor]:
    values = draw(TOKENS, PADDED).mul(3).bfloat16()[:, :VOCAB]
    target = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(2))
    factor = draw(TOKENS, seed=3).float()
    top = values.float().amax(-1)
    return [values, top, values.float().logsumexp(-1) - top, target, factor, -factor]


def changed_weights() -> list[Tensor]:
    exact = draw(1000).float()
    seen = exact.bfloat16()
    seen[3], seen[500], seen[999] = 7.0, float("inf"), -seen[999]
    return [exact, seen]


def _changed_rows() -> list[Tensor]:
    return [x.view(-1, 4) for x in changed_weights()]  # `copy_changed_in_slices` needs multiples of 4 elements


def _experts() -> dict[str, Tensor]:
    shapes = {"weights": (TOKENS, 1, 2), "outputs": (TOKENS, 2, 8), "grad": (TOKENS, 1, 8)}
    return {name: draw(*shape, seed=seed).bfloat16() for seed, (name, shape) in enumerate(shapes.items())}


def _of_experts(*names: str) -> Callable[[], list[Any]]:
    return lambda: [_experts()[name] for name in names]


FUNCTIONS: dict[str, tuple[Fused, Callable[[], list[Any]]]] = {
    "top_and_log_sum": (fused_cross_entropy.max_and_log_sum, lambda: [_gradient_inputs()[0], torch.float32]),
    "write_gradient": (fused_cross_entropy.write_gradient, _gradient_inputs),
    "adopt_changes": (Fused(buckets.copy_changed, buckets.copy_changed_in_slices), _changed_rows),
    "sum_outputs": (mixture.sum_outputs, _of_experts("weights", "outputs")),
    "gradient_of_weights": (mixture.gradient_of_weights, _of_experts("grad", "outputs")),
    "gradient_of_outputs": (mixture.gradient_of_outputs, _of_experts("weights", "grad")),
}


def compiled_equals_eager(name: str, device: torch.device) -> None:
    """Check that outputs and overwritten inputs are equal up to one rounding to their dtype, for two sizes."""
    function, inputs = FUNCTIONS[name]
    compiled_function = compile_pointwise(function.plain)
    for rows in (TOKENS, TOKENS - 2):
        found = []
        for run in (compiled_function, function.eager):
            given = [x.to(device, copy=True)[:rows] if isinstance(x, Tensor) else x for x in inputs()]
            found.append([run(*given), *(x for x in given if isinstance(x, Tensor))])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)

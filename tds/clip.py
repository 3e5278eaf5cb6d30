"""Gradient clipping (Pascanu et al. 2013) by the norm over all stages, which counts each parameter once."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ._torch import norms, scale_all
from .sparse import grad_values


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that a torch optimizer steps, in the order of its groups."""
    weights: list[Tensor] = []
    for group in optimizer.param_groups:
        weights += group["params"]
    return weights


def trainable_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of `module` that require a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


def is_split(parameter: nn.Parameter) -> bool:
    """Return whether tensor-parallel ranks hold different shards of `parameter`.

    Users set the attribute `tensor_model_parallel` or `model_parallel`; DeepSpeed reads both, too.
    """
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def is_unique_param(parameter: nn.Parameter, model_rank: int) -> bool:
    """Return whether this rank counts `parameter` in a sum over all parameters of the model.

    A parameter sharded over the tensor-parallel ranks counts on each of them. A replicated parameter counts on
    the first of these ranks only, and a tied parameter on the first stage that has it.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return model_rank == 0 or is_split(parameter)


def local_squared_norm(parameters: Iterable[nn.Parameter], model_rank: int, device: torch.device) -> Tensor:
    """Return this rank's part of the squared global gradient norm, a scalar in fp64.

    It is NaN or Inf if any gradient on this rank contains NaN or Inf, even one that another rank counts.
    """
    counted_grads = [(grad_values(p), is_unique_param(p, model_rank)) for p in parameters if p.grad is not None]
    return counted_squared_norm(counted_grads, device)


def counted_squared_norm(gradients: Iterable[tuple[Tensor, bool]], device: torch.device) -> Tensor:
    """Return the squared norm of the counted gradients, a scalar in fp64.

    The result is NaN or Inf if any gradient contains NaN or Inf, counted or not.
    gradients: (gradient, whether it is counted) pairs.
    """
    by_counted: dict[bool, list[Tensor]] = {True: [], False: []}
    for gradient, is_counted in gradients:
        by_counted[is_counted].append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for is_counted, grads in by_counted.items():
        if grads:
            squares = torch.stack(norms(grads)).double().square().sum()
            total += squares if is_counted else 0 * squares  # 0 * squares is NaN if a gradient is NaN or Inf
    return total


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Clip the gradients to the global norm `limit` (0: no clipping). norm: the current global norm, a scalar."""
    clip([grad_values(p) for p in parameters if p.grad is not None], norm, limit)


def clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Clip `gradients`, which may have several dtypes, to the global norm `limit` (0: no clipping)."""
    if limit <= 0 or not gradients:
        return
    # Multiplying by a clamped factor avoids reading a value back from the device.
    factor = (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, grads in by_dtype.items():
        # The factor is not in half precision, because it would be rounded, possibly to 0.
        factor_dtype = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        scale_all(grads, factor.to(factor_dtype))

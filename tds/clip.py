"""Gradient clipping by the norm over all stages and tensor-parallel ranks, each parameter counted once.

Pascanu et al. 2013.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._torch import norms, scale_all
from .sparse import numbers_of

# These optimizers count steps per tensor or not at all.
ONE_BY_ONE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that a torch optimizer steps, in the order of its groups."""
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        found += group["params"]
    return found


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


def squared_norm_here(parameters: Iterable[nn.Parameter], model_rank: int, device: torch.device) -> Tensor:
    """Return this rank's part of the squared global gradient norm, a scalar in fp64.

    The result is NaN or Inf if any gradient on this rank contains NaN or Inf. This includes gradients of replicated
    weights that another rank counts.
    """
    there = [(numbers_of(p), is_unique_param(p, model_rank)) for p in parameters if p.grad is not None]
    return squared_norm_of(there, device)


def squared_norm_of(gradients: Iterable[tuple[Tensor, bool]], device: torch.device) -> Tensor:
    """Return the squared norm of the counted gradients, a scalar in fp64.

    The result is NaN or Inf if any gradient contains NaN or Inf, counted or not.
    gradients: (gradient, whether it is counted) pairs.
    """
    sorted_out: dict[bool, list[Tensor]] = {True: [], False: []}
    for gradient, is_counted in gradients:
        sorted_out[is_counted].append(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for is_counted, grads in sorted_out.items():
        if grads:
            squares = torch.stack(norms(grads)).double().square().sum()
            total += squares if is_counted else 0 * squares  # 0 * squares is NaN if a gradient is NaN or Inf
    return total


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Clip the gradients to the global norm `limit` (0: no clipping). norm: the current global norm, a scalar."""
    _clip([numbers_of(p) for p in parameters if p.grad is not None], norm, limit)


def clip_in_step(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Clip `gradients` to the global norm `limit` (0: no clipping) before or in the next `optimizer.step()`.

    A fused optimizer divides them in its kernel, which saves a pass over all gradients. Its divisor is in fp32, so
    gradients in fp64 are clipped here. If `norm`, the current global norm, is not finite, the step is a no-op.
    """
    leave_out_unless_finite(optimizer, norm)
    in_kernel = limit > 0 and is_fused(optimizer) and all(g.dtype is not torch.float64 for g in gradients)
    divisor = ((norm + 1e-6) / limit).clamp(min=1.0).float() if in_kernel else None
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]
    if not in_kernel:
        _clip(gradients, norm, limit)


def _clip(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    if limit <= 0 or not gradients:
        return
    # Multiplying by a clamped factor avoids reading a value back from the device.
    factor = (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0].device)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, alike in by_dtype.items():
        # The factor is not in half precision, because it would be rounded, possibly to 0.
        wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        scale_all(alike, factor.to(wide))


def leave_out_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Make the next `optimizer.step()` a no-op, moments and step counts included, if `norm`, a scalar, is not finite.

    torch's fused Adam reads a flag on the device. For any other optimizer, the host reads the norm, which
    synchronizes with the device in every step, and drops the gradients if the norm is not finite. These other
    optimizers include apex's Adam and torch's fused SGD. The kernel of fused SGD would leave the momentum uninitialised
    if it skipped the first step.
    """
    if is_fused(optimizer) and not isinstance(optimizer, torch.optim.SGD):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    elif not norm.isfinite():
        drop_gradients(optimizer)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop all gradients, so that the next `optimizer.step()` is a no-op, step counts included."""
    for parameter in weights_of(optimizer):
        parameter.grad = None
    if steps_separately(optimizer):
        return
    inner = adam_of(optimizer)
    for group in inner.param_groups:
        if "step" in group or type(inner).__module__.startswith("apex."):  # counts a step even without gradients
            group["step"] = group.get("step", 0) - 1


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one of torch's fused kernels, which read the attribute `grad_scale`, steps all weights.

    An optimizer that calls a fused optimizer, such as Muon, has groups that are fused, but its attributes are not read.
    """
    return isinstance(optimizer, ONE_BY_ONE) and all(group.get("fused") for group in optimizer.param_groups)


def adam_of(wrapped: torch.optim.Optimizer) -> Any:
    """Return the Adam inside Muon, or None if Muon has none; return any other optimizer itself."""
    return getattr(wrapped, "adamw", wrapped)


def steps_separately(wrapped: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer counts steps per weight or not at all, so that some weights can be stepped first."""
    inner = adam_of(wrapped)  # Muon itself counts no steps
    return inner is None or type(inner) in ONE_BY_ONE or getattr(inner, "steps_separately", False)

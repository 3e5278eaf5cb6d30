"""Gradient clipping by the norm over all stages and tensor-parallel ranks, each parameter counted once (Pascanu et al. 2013)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ._torch import norms, scale_all
from .sparse import numbers_of


def is_split(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks hold other parts, as `parameter` says by either name that DeepSpeed reads and users set."""
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def counts_here(parameter: nn.Parameter, model_rank: int) -> bool:
    """Whether this rank answers for `parameter` in a sum over all parameters of the model.

    A parameter split over the tensor-parallel ranks counts on each (each holds another part);
    a copied one on the first only; a tied one on the first stage that has it only.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return model_rank == 0 or is_split(parameter)


def squared_norm_here(parameters: Iterable[nn.Parameter], model_rank: int, device: torch.device) -> Tensor:
    """This rank's part of the square of the gradients' norm over all stages and tensor-parallel ranks, a scalar in fp64.

    It is not finite if any gradient on this rank is not, that of a copy which does not count included.
    """
    there = [(numbers_of(p), counts_here(p, model_rank)) for p in parameters if p.grad is not None]
    return squared_norm_of(there, device)


def squared_norm_of(gradients: Iterable[tuple[Tensor, bool]], device: torch.device) -> Tensor:
    """The square of the norm of those gradients that count, a scalar in fp64; not finite if any of the others is not."""
    total, there = torch.zeros((), dtype=torch.float64, device=device), list(gradients)
    for counted in (True, False):
        grads = [g.to(torch.promote_types(g.dtype, torch.float32)) for g, counts in there if counts is counted]
        if grads:
            squares = torch.stack(norms(grads)).double().square().sum()
            total += squares if counted else 0 * squares  # which is nan unless all are finite
    return total


def clip_by_norm(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale the gradients of these parameters, of which and of other ranks' this is the norm, to at most `limit` (0: leave them)."""
    grads = [numbers_of(p) for p in parameters if p.grad is not None]
    if limit > 0 and grads:
        # A product with a clamped factor, so that no value is read back from the device.
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        scale_all(grads, factor.to(grads[0].device, grads[0].dtype))


def leave_out_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Before `optimizer.step()`: let it change nothing, neither weights nor moments nor step counts, if `norm` is not finite.

    torch's fused Adam takes that from a flag on the device. Any other (SGD, which would keep momentum that it has not filled,
    apex's Adam) is asked for by the host, which waits for the device in every step: it gets no gradients.
    """
    if all(group.get("fused") for group in optimizer.param_groups) and not isinstance(optimizer, torch.optim.SGD):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    elif not norm.isfinite():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
            if not isinstance(optimizer, torch.optim.SGD):  # apex's Adam counts calls
                group["step"] = group.get("step", 0) - 1

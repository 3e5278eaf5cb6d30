"""The norm of all gradients of the model, each parameter counted once over the whole grid."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import norms, scale_all
from .mesh import Mesh, current
from .parameters import is_split


def counts_here(parameter: nn.Parameter, model_rank: int) -> bool:
    """Whether this rank answers for `parameter` in a sum over all parameters of the model.

    A parameter split over the model-parallel ranks counts on each (each holds another part);
    a copied one on the first only; a tied one on the first stage that has it only.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return model_rank == 0 or is_split(parameter)


def grad_norm(parameters: Iterable[nn.Parameter], mesh: Mesh | None = None) -> Tensor:
    """The 2-norm of the gradients of the whole model, a scalar, the same on every rank, fp32 (fp64 for fp64).

    Gradients must already agree over the data-parallel ranks. It is not finite if any gradient on any rank of the
    model is not, that of a copy which does not count included.
    """
    mesh = mesh or current()
    there = [(p.grad.detach(), counts_here(p, mesh.model.rank)) for p in parameters if p.grad is not None]
    dtype = torch.promote_types(there[0][0].dtype, torch.float32) if there else torch.float32
    total = torch.zeros((), dtype=torch.float64, device=there[0][0].device if there else "cpu")
    for counted in (True, False):
        grads = [grad.to(dtype) for grad, counts in there if counts is counted]
        if grads:
            squares = torch.stack(norms(grads)).double().square().sum()
            total += squares if counted else 0 * squares  # which is nan unless all are finite
    if mesh.replica.size > 1:
        dist.all_reduce(total, group=mesh.replica.group)
    return total.sqrt().to(dtype)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh | None = None) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before, a scalar.

    max_norm 0 only measures (Pascanu et al. 2013).
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    if max_norm > 0:
        # Written as a product with a clamped factor so that no value is read back from the device.
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            scale_all(grads, factor.to(grads[0].device, grads[0].dtype))
    return norm

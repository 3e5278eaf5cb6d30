"""The norm of all gradients of the model, each parameter counted once over the whole grid: `tds.clip` on a mesh."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import Mesh, current

# tds is imported where it is needed: it brings DeepSpeed, which takes seconds that only training should pay.


def counts_here(parameter: nn.Parameter, model_rank: int) -> bool:
    """Whether this rank answers for `parameter` in a sum over all parameters of the model: see `tds.clip.counts_here`."""
    from tds import clip

    return clip.counts_here(parameter, model_rank)


def grad_norm(parameters: Iterable[nn.Parameter], mesh: Mesh | None = None) -> Tensor:
    """The 2-norm of the gradients of the whole model, a scalar, the same on every rank, fp32 (fp64 for fp64).

    Gradients must already agree over the data-parallel ranks. It is not finite if any gradient on any rank of the
    model is not.
    """
    from tds.clip import squared_norm_here

    mesh, parameters = mesh or current(), list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    device = parameters[0].device if parameters else torch.device("cpu")
    total = squared_norm_here(parameters, mesh.model.rank, device)
    if mesh.replica.size > 1:
        dist.all_reduce(total, group=mesh.replica.group)
    return total.sqrt().to(torch.promote_types(grads[0].dtype, torch.float32) if grads else torch.float32)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, mesh: Mesh | None = None) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before, a scalar. 0 only measures."""
    from tds.clip import clip_by_norm

    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    clip_by_norm(parameters, norm, max_norm)
    return norm

"""Norm and clipping of the whole model's gradients, counting each parameter once over all ranks (see `tds.clip`)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tds import clip
from tds.clip import is_split as is_split
from tds.clip import is_unique_param as is_unique_param
from tds.param_replicas import replica_squared_norm

from .current import current_mesh
from .data import default_device
from .mesh import Mesh
from .vocab_shards import reduce_in_place


def grad_norm(parameters: Iterable[nn.Parameter] | nn.Parameter, mesh: Mesh | None = None) -> Tensor:
    """Return the 2-norm of the whole model's gradients, a scalar, equal on every rank, fp32 (fp64 for fp64 gradients).

    The gradients must already be reduced over the data-parallel ranks. The norm is NaN or Inf if any
    gradient on any rank of the model is NaN or Inf.
    """
    mesh = mesh or current_mesh()
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # type: ignore[list-item]
    grads = [p.grad for p in parameters if p.grad is not None]
    device = torch.device("cpu")
    if parameters:
        device = parameters[0].device
    elif mesh.replica.size > 1:  # the other ranks may have parameters
        device = default_device(mesh.replica)
    # This rank's part: its shards, and on model-parallel rank 0 also the weights that all these ranks hold. The data
    # ranks hold equal gradients, except those of experts, whose squares are summed over the data group.
    squared_norm = replica_squared_norm(parameters, mesh.model.rank, device, mesh.data.group)
    reduce_in_place(squared_norm, mesh.replica)  # over the tensor- and pipeline-parallel ranks of one copy of the model
    dtype = torch.float32
    if grads:
        grad_dtype = grads[0].dtype.to_real()
        dtype = torch.promote_types(grad_dtype, dtype)
    return squared_norm.sqrt().to(dtype)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, norm_type: float = 2, mesh: Mesh | None = None
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before scaling, a scalar.

    A max_norm of 0 leaves the gradients unchanged. Raises ValueError for a norm_type other than 2.
    """
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type} is not supported: only the 2-norm of gradients can be clipped")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # type: ignore[list-item]
    norm = grad_norm(parameters, mesh)
    clip.clip_by_norm(parameters, norm, max_norm)
    return norm

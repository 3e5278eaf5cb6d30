"""Initial weights that do not depend on the layout: each is drawn whole from (seed, its global name), then cut."""

from typing import Any

import torch
from torch import Tensor, nn

from megatron import mpu

from .layers import global_parameters


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of this rank's part, also where ZeRO-3 has taken it apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_rows(parameter: nn.Parameter) -> tuple[int, int, int]:
    """(dimension, first, last+1) of the true rows of the whole parameter that this rank holds.

    Padding is left out; (0, 0, rows) for a parameter that is a copy on every rank.
    """
    dim, shape = getattr(parameter, "partition_dim", None), local_shape(parameter)
    if dim is None:
        return 0, 0, shape[0]
    rank = parameter.model_rank  # type: ignore[attr-defined]
    rows = shape[dim]
    full = parameter.full_size  # type: ignore[attr-defined]
    return dim, min(rank * rows, full), min((rank + 1) * rows, full)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, as if there were one rank and no padding."""
    shape = list(local_shape(parameter))
    dim = getattr(parameter, "partition_dim", None)
    if dim is not None:
        shape[dim] = parameter.full_size  # type: ignore[attr-defined]
    return tuple(shape)


@torch.no_grad()
def put(parameter: Tensor, like: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's rows of `whole` into `parameter`, laid out as `like`; padding becomes zero."""
    dim, first, end = own_rows(like)
    parameter.zero_()
    parameter.narrow(dim, 0, end - first).copy_(whole.narrow(dim, first, end - first))


def init_weights(model: Any, seed: int) -> None:
    """Fill every parameter of `model` as its `init_std` says."""
    for name, parameter in global_parameters(model):
        std = getattr(parameter, "init_std", 0.0)
        if std is None:
            nn.init.ones_(parameter)
        elif std == 0.0:
            nn.init.zeros_(parameter)
        else:
            generator = torch.Generator().manual_seed(mpu.derive_seed(seed, "weights", name))
            whole = torch.empty(full_shape(parameter)).normal_(0.0, std, generator=generator)
            put(parameter, parameter, _scaled(whole, getattr(parameter, "init_factors", None)))


def _scaled(whole: Tensor, factors: tuple[int, tuple[float, ...]] | None) -> Tensor:
    """Multiply stretches of rows by factors in turn. factors: (rows of a stretch, factor of each), or None."""
    if factors is None:
        return whole
    rows, values = factors
    return (whole.view(-1, len(values), rows, whole.shape[1]) * torch.tensor(values).view(1, -1, 1, 1)).view_as(whole)

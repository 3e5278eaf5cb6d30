"""Number of parameters of a whole model, over all stages and expert-parallel ranks."""

import math
from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron import mpu

from .layers import global_parameters


def sizes_of_parameters(model: Any, among: Collection[nn.Parameter] | None = None) -> dict[str, int]:
    """Return name -> number of elements, without padding, of each parameter of the whole model, tied parameters once.

    Collective over the stages and the expert-parallel ranks. among: count only these weights.
    """
    mesh = mpu.get_mesh()
    sizes = {
        name: math.prod(mpu.spec_of(p).full_shape)
        for name, p in global_parameters(model)
        if among is None or p in among
    }
    # First add the weights of the other stages, then the other experts of all stages. Names are global, so a tied
    # weight, which several stages hold, stays one entry.
    for axis in (mesh.pipe, mesh.expert):
        if axis.group is not None:
            sizes_by_rank: list[Any] = [None] * axis.size
            dist.all_gather_object(sizes_by_rank, sizes, axis.group)
            for rank_sizes in sizes_by_rank:
                sizes |= rank_sizes
    return sizes


def count_parameters(model: Any, among: Collection[nn.Parameter] | None = None) -> int:
    """Return the number of parameters of the whole model. Collective, see `sizes_of_parameters`."""
    return sum(sizes_of_parameters(model, among).values())

"""Where this rank stands in the (pipe, data, model) grid, and layers split over it.

`initialize_model_parallel` builds the grid once; layers take their axis from it when they are
built and never look it up again. Everything takes numbers, nothing takes a configuration.
"""

import torch.distributed as dist

from . import mesh as _mesh
from .cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_right
from .data import broadcast_data
from .grads import clip_grad_norm, counts_here, grad_norm
from .layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    declare,
    padded_vocab_size,
)
from .linear import is_asked_for, onednn_is_there
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from .mesh import Axis, Mesh
from .random import RngStreams, checkpoint, derive_seed
from .reducer import GradReducer
from .sequence import (
    gather_from_sequence_parallel_region,
    own_stretch,
    pad_sequence,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    shared_along_sequence,
    whole_length,
)
from .topology import Coord, Topology


def initialize_model_parallel(
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
    seed: int = 1234,
    sequence_parallel: bool = False,
    onednn: bool = False,
    overlap: bool = True,
) -> Mesh:
    """Lay the running ranks out as pipe x data x model and make their groups.

    sequence_parallel: let layers built from now on keep hidden states split along the sequence over
    the model-parallel ranks (Korthikanti et al. 2022); without effect where such a rank is alone.
    onednn: let linear layers built from now on multiply by oneDNN; overlap: and sum the gradients of their inputs
    over the model-parallel ranks while they compute those of their weights; for both see `linear.py`.
    Raises ValueError if the product of the two sizes does not divide the number of ranks.
    """
    world, cell = dist.get_world_size(), model_parallel_size * max(pipe_parallel_size, 1)
    if world % cell:
        raise ValueError(
            f"{world} ranks cannot be laid out: the model-parallel size {model_parallel_size} times the "
            f"pipeline-parallel size {max(pipe_parallel_size, 1)} must divide them"
        )
    topology = Topology(pipe=max(pipe_parallel_size, 1), data=world // cell, model=model_parallel_size)
    _mesh.enter(Mesh.build(topology, seed, sequence_parallel, onednn, overlap))
    return _mesh.current()


def model_parallel_is_initialized() -> bool:
    return _mesh.is_initialized()


def destroy_model_parallel() -> None:
    _mesh.enter(None)


def get_mesh() -> Mesh:
    return _mesh.current()


def get_topology() -> Topology:
    return _mesh.current().topology


def get_model_parallel_rank() -> int:
    return _mesh.current().model.rank


def get_model_parallel_world_size() -> int:
    return _mesh.current().model.size


def get_model_parallel_group() -> dist.ProcessGroup:
    return _group(_mesh.current().model)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this model-parallel line: the one that reads data."""
    return _mesh.current().model.first


def get_data_parallel_rank() -> int:
    return _mesh.current().data.rank


def get_data_parallel_world_size() -> int:
    return _mesh.current().data.size


def get_data_parallel_group() -> dist.ProcessGroup:
    return _group(_mesh.current().data)


def get_pipe_parallel_rank() -> int:
    return _mesh.current().pipe.rank


def get_pipe_parallel_world_size() -> int:
    return _mesh.current().pipe.size


def get_pipe_parallel_group() -> dist.ProcessGroup:
    return _group(_mesh.current().pipe)


_ALONE: dict[int, dist.ProcessGroup] = {}


def _group(axis: Axis) -> dist.ProcessGroup:
    """The process group of `axis`; DeepSpeed wants one even where a rank is alone."""
    if axis.group is not None:
        return axis.group
    me = dist.get_rank()
    if dist.get_world_size() == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    if me not in _ALONE:
        # Made without the others, so that only ranks that ask for it take part.
        _ALONE[me] = dist.new_group([me], use_local_synchronization=True)
    return _ALONE[me]


__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Coord",
    "GradReducer",
    "Mesh",
    "RngStreams",
    "RowParallelLinear",
    "Topology",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "counts_here",
    "declare",
    "derive_seed",
    "destroy_model_parallel",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_mesh",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_topology",
    "grad_norm",
    "initialize_model_parallel",
    "onednn_is_there",
    "is_asked_for",
    "model_parallel_is_initialized",
    "own_stretch",
    "pad_sequence",
    "padded_vocab_size",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "shared_along_sequence",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_right",
    "whole_length",
]

"""Where this rank stands in the (pipe, data, model) grid, and layers split over it.

`initialize_model_parallel` builds the grid once; layers take their axis from it when they are
built and never look it up again. Everything takes numbers, nothing takes a configuration.
"""

import torch.distributed as dist

from .._torch import onednn_is_there
from . import mesh as _mesh
from .context import gather_context, own_tokens, stretches, sum_to_own_context, whole_context
from .cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_losses, vocab_parallel_right
from .data import broadcast_data
from .dropout import Stream
from .grads import clip_grad_norm, counts_here, grad_norm
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, padded_vocab_size
from .linear import is_asked_for
from .linear_cross_entropy import DeferredLogits, whole_logits
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_partial_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from .mesh import Axis, Mesh, Options, Surroundings, built_with, neighbours
from .original import (
    LayerNorm,
    checkpoint,
    divide,
    get_cuda_rng_tracker,
    is_unitialized,
    model_parallel_cuda_manual_seed,
    set_model_parallel_rank,
    set_model_parallel_world_size,
    split_tensor_along_last_dim,
)
from .parameters import InitMethod, ParamSpec, declare, filled_later, is_split, normal, ones, spec_of, undrawn, zeros
from .random import RngStreams, derive_seed, seeded
from .sequence import (
    gather_from_sequence_parallel_region,
    local_shard,
    pad_sequence,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    whole_length,
)
from .topology import Coord, Topology


def initialize_model_parallel(
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
    seed: int = 1234,
    options: Options | None = None,
    context_parallel_size: int = 1,
) -> Mesh:
    """Lay the running ranks out as pipe x data x model and make their groups.

    seed: of the dropout streams. options: how layers built from now on work on these ranks. context_parallel_size: ranks of the
    data axis that share out each sample.
    Raises ValueError if the product of the sizes does not divide the number of ranks.
    """
    world, cell = dist.get_world_size(), model_parallel_size * max(pipe_parallel_size, 1)
    if world % (cell * context_parallel_size):
        context = f" times the context-parallel size {context_parallel_size}" if context_parallel_size > 1 else ""
        raise ValueError(
            f"{world} ranks cannot be laid out: the model-parallel size {model_parallel_size} times the "
            f"pipeline-parallel size {max(pipe_parallel_size, 1)}{context} must divide them"
        )
    stages, data = max(pipe_parallel_size, 1), world // cell
    topology = Topology(pipe=stages, data=data, model=model_parallel_size, context=context_parallel_size)
    mesh = Mesh.build(topology)
    _mesh.enter(Surroundings(mesh, options or Options(), mesh.streams(seed)))
    return mesh


def model_parallel_is_initialized() -> bool:
    """Whether this process stands in a mesh."""
    return _mesh.is_initialized()


def destroy_model_parallel() -> None:
    """Leave the mesh; its process groups stay torch's."""
    _mesh.enter(None)


def get_mesh() -> Mesh:
    """Where this rank stands. Raises RuntimeError before `initialize_model_parallel`."""
    return _mesh.current()


def get_options() -> Options:
    """How layers built now work."""
    return _mesh.surroundings().options


def get_rng() -> RngStreams:
    """The dropout streams that layers built now draw from."""
    return _mesh.surroundings().rng


def sequence_axis() -> Axis:
    """The ranks over which layers built now share a sequence out: the model-parallel ones, or nobody else."""
    return _mesh.surroundings().sequence


def context_axis() -> Axis:
    """The ranks that share out the tokens of the same samples."""
    return _mesh.current().context


def get_topology() -> Topology:
    """The whole (pipe, data, model) grid."""
    return _mesh.current().topology


def get_model_parallel_rank() -> int:
    """On the model axis, that of tensor parallelism."""
    return _mesh.current().model.rank


def get_model_parallel_world_size() -> int:
    """Of the model axis, that of tensor parallelism."""
    return _mesh.current().model.size


def get_model_parallel_group() -> dist.ProcessGroup:
    """Of the model axis, that of tensor parallelism."""
    return _group(_mesh.current().model)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this model-parallel line: the one that reads data."""
    return _mesh.current().model.first


def get_data_parallel_rank() -> int:
    """On the data axis, on which the ranks of a context group follow each other."""
    return _mesh.current().data.rank


def get_data_parallel_world_size() -> int:
    """Of the data axis: all that hold copies of the same weights, those of a context group among them."""
    return _mesh.current().data.size


def get_data_parallel_group() -> dist.ProcessGroup:
    """Of the data axis."""
    return _group(_mesh.current().data)


def get_pipe_parallel_rank() -> int:
    """On the pipe axis."""
    return _mesh.current().pipe.rank


def get_pipe_parallel_world_size() -> int:
    """Of the pipe axis."""
    return _mesh.current().pipe.size


def get_pipe_parallel_group() -> dist.ProcessGroup:
    """Of the pipe axis."""
    return _group(_mesh.current().pipe)


def get_io_parallel_group() -> dist.ProcessGroup:
    """The ranks that read data: the first model-parallel rank of each replica, of a pipeline on its first and last stage.

    All of them must call it the first time. Without a pipeline it is the data-parallel group of every rank. Raises
    RuntimeError on a rank of a pipeline that reads nothing.
    """
    grid = get_topology()
    if grid.pipe == 1:
        return get_data_parallel_group()
    ranks = sorted({*grid.filter_match(pipe=0, model=0), *grid.filter_match(pipe=grid.pipe - 1, model=0)})
    if dist.get_rank() not in ranks:
        raise RuntimeError(f"rank {dist.get_rank()} reads no data, so it has no io group; ranks {ranks} do")
    return _of_these(tuple(ranks))


def _group(axis: Axis) -> dist.ProcessGroup:
    """The process group of `axis`; DeepSpeed wants one even where a rank is alone."""
    if axis.group is not None:
        return axis.group
    if dist.get_world_size() == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    return _of_these((dist.get_rank(),))


def _of_these(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group made when it is first asked for, without the others, so that only ranks that ask for it take part."""
    return _mesh.group_of_members(ranks)


__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Coord",
    "DeferredLogits",
    "InitMethod",
    "LayerNorm",
    "Mesh",
    "Options",
    "ParamSpec",
    "RngStreams",
    "Stream",
    "RowParallelLinear",
    "Topology",
    "VocabParallelEmbedding",
    "broadcast_data",
    "built_with",
    "checkpoint",
    "clip_grad_norm",
    "context_axis",
    "copy_to_model_parallel_region",
    "counts_here",
    "declare",
    "derive_seed",
    "destroy_model_parallel",
    "divide",
    "filled_later",
    "gather_context",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_partial_from_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_io_parallel_group",
    "get_mesh",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_options",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "get_rng",
    "get_topology",
    "grad_norm",
    "initialize_model_parallel",
    "is_asked_for",
    "is_split",
    "is_unitialized",
    "local_shard",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "neighbours",
    "normal",
    "onednn_is_there",
    "ones",
    "own_tokens",
    "pad_sequence",
    "padded_vocab_size",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "seeded",
    "sequence_axis",
    "set_model_parallel_rank",
    "set_model_parallel_world_size",
    "spec_of",
    "split_tensor_along_last_dim",
    "stretches",
    "sum_to_own_context",
    "undrawn",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_losses",
    "vocab_parallel_right",
    "whole_context",
    "whole_length",
    "whole_logits",
    "zeros",
]

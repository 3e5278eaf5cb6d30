"""Model-parallel utilities: this rank's place in the (pipe, data, model) grid, and sharded layers.

`initialize_model_parallel` builds the grid once. The constructor of a layer takes the layer's process groups from
the grid. Functions take plain values instead of a configuration object.
"""

import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._torch import onednn_is_there
from . import mesh as _mesh
from .accuracy import vocab_parallel_right
from .context import all_gather_context, context_slices, gather_context, own_tokens, reduce_scatter_context
from .cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_losses
from .data import broadcast_data
from .dropout import Stream
from .exchange import exchange_rows
from .grads import clip_grad_norm, grad_norm, is_split, is_unique_param
from .layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, padded_vocab_size
from .linear_cross_entropy import DeferredLogits, whole_logits
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from .matmuls import needs_grad
from .megatron_compat import (
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
from .mesh import (
    TRIVIAL_AXIS,
    Axis,
    Mesh,
    Options,
    ParallelContext,
    after_each_layer,
    built_with,
    defer_init,
    neighbours,
    parallel_context,
    skip_init,
)
from .parameters import (
    FusedRows,
    InitMethod,
    ParamSpec,
    declare,
    normal,
    ones,
    replicas_of,
    sharded_by_zero,
    spec_of,
    zeros,
)
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
from .traced import gather_partial_from_model_parallel_region
from .wide_sums import embedding


def initialize_model_parallel(
    model_parallel_size: int = 1,
    pipe_parallel_size: int = 1,
    seed: int = 1234,
    options: Options | None = None,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> Mesh:
    """Arrange the running ranks in a pipe x data x model grid, create the process groups and make the mesh current.

    seed: seed of the dropout streams.
    options: communication and kernel options of layers built from now on.
    context_parallel_size: number of data-parallel ranks over which the tokens of each sample are sharded.
    expert_parallel_size: number of data-parallel ranks that divide the experts of a layer among themselves.
    Raises ValueError unless the product of the model-, pipeline- and context-parallel sizes divides the number of
    ranks.
    """
    world = dist.get_world_size()
    cell = model_parallel_size * max(pipe_parallel_size, 1)
    if world % (cell * context_parallel_size):
        context = f" times the context-parallel size {context_parallel_size}" if context_parallel_size > 1 else ""
        raise ValueError(
            f"{world} ranks do not form a grid: the model-parallel size {model_parallel_size} times the "
            f"pipeline-parallel size {max(pipe_parallel_size, 1)}{context} must divide the number of ranks"
        )
    stages = max(pipe_parallel_size, 1)
    data = world // cell
    topology = Topology(stages, data, model_parallel_size, context_parallel_size, expert_parallel_size)
    mesh = Mesh.build(topology)
    _mesh.enter(_mesh.context_on(mesh, options, seed))
    return mesh


def model_parallel_is_initialized() -> bool:
    """Return whether this process has a current mesh."""
    return _mesh.is_initialized()


def destroy_model_parallel() -> None:
    """Forget the current mesh; its torch process groups stay open."""
    _mesh.enter(None)


def get_mesh() -> Mesh:
    """Return the mesh of this rank.

    Raises RuntimeError if several ranks run and `initialize_model_parallel` has not been called.
    """
    return _mesh.current()


def get_options() -> Options:
    """Return the options that layers built now would use."""
    return _mesh.parallel_context().options


def get_rng() -> RngStreams:
    """Return the dropout streams that layers built now would draw from."""
    return _mesh.parallel_context().rng


def sequence_axis() -> Axis:
    """Return the sequence-parallel axis for a layer that is built under the current setting.

    With sequence parallelism this is the model axis, otherwise an axis of this rank alone.
    """
    return _mesh.parallel_context().sequence


def context_axis() -> Axis:
    """Return the context-parallel axis: the ranks that hold different tokens of the same samples."""
    return _mesh.current().context


def get_topology() -> Topology:
    """Return the (pipe, data, model) grid of all ranks."""
    return _mesh.current().topology


def get_model_parallel_rank() -> int:
    """Return this rank's index on the model axis (tensor parallelism)."""
    return _mesh.current().model.rank


def get_model_parallel_world_size() -> int:
    """Return the number of ranks on the model axis (tensor parallelism)."""
    return _mesh.current().model.size


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the model axis (tensor parallelism)."""
    return _group(_mesh.current().model)


def get_model_parallel_src_rank() -> int:
    """Return the global rank of this model-parallel group's first rank, the rank that reads the data."""
    return _mesh.current().model.first


def get_data_parallel_rank(with_context_parallel: bool = True) -> int:
    """Return this rank's index on the data axis; ranks of one context-parallel group have consecutive indices.

    with_context_parallel: False for the index of this rank's replica, as by default in Megatron-core. The default here
    is what DeepSpeed, which calls this function without arguments, needs to sum gradients.
    """
    mesh = _mesh.current()
    return mesh.data.rank if with_context_parallel else mesh.share.number


def get_data_parallel_world_size(with_context_parallel: bool = True) -> int:
    """Return the number of ranks on the data axis, including context-parallel ranks.

    with_context_parallel: False for the number of replicas, each of which reads samples of its own, as by default in
    Megatron-core. See `get_data_parallel_rank`.
    """
    mesh = _mesh.current()
    return mesh.data.size if with_context_parallel else mesh.share.of


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the data axis."""
    return _group(_mesh.current().data)


def get_pipe_parallel_rank() -> int:
    """Return this rank's pipeline stage."""
    return _mesh.current().pipe.rank


def get_pipe_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return _mesh.current().pipe.size


def get_pipe_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the pipe axis."""
    return _group(_mesh.current().pipe)


def get_io_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that read data.

    With a pipeline, these are the ranks with model-parallel rank 0 on the first and the last stage. The first
    call creates the group, so all these ranks must make it together. Without a pipeline, returns this rank's
    data-parallel group. Raises RuntimeError on a pipeline rank that reads no data.
    """
    grid = get_topology()
    if grid.pipe == 1:
        return get_data_parallel_group()
    ranks = sorted({*grid.filter_match(pipe=0, model=0), *grid.filter_match(pipe=grid.pipe - 1, model=0)})
    if dist.get_rank() not in ranks:
        raise RuntimeError(
            f"rank {dist.get_rank()} reads no data, so it has no io-parallel group; only ranks {ranks} have one"
        )
    return _mesh.group_of_members(tuple(ranks))


def _group(axis: Axis) -> dist.ProcessGroup:
    """Return the process group of `axis`; DeepSpeed requires one even for a single rank."""
    if axis.group is not None:
        return axis.group
    if dist.get_world_size() == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    return _mesh.group_of_members((dist.get_rank(),))


_HOMES = {
    "ALONE": "TRIVIAL_AXIS",
    "counts_here": "is_unique_param",
    "filled_later": "defer_init",
    "is_asked_for": "needs_grad",
    "stretches": "context_slices",
    "sum_to_own_context": "reduce_scatter_context",
    "undrawn": "skip_init",
    "whole_context": "all_gather_context",
}  # old name -> new name

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return the object to which a deprecated `name` refers, and warn; the next minor version drops these names."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"mpu.{name} is now mpu.{_HOMES[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_HOMES[name]]


__all__ = [
    "TRIVIAL_AXIS",
    "Axis",
    "ColumnParallelLinear",
    "Coord",
    "DeferredLogits",
    "FusedRows",
    "InitMethod",
    "LayerNorm",
    "Mesh",
    "Options",
    "ParallelContext",
    "ParamSpec",
    "RngStreams",
    "RowParallelLinear",
    "Stream",
    "Topology",
    "VocabParallelEmbedding",
    "after_each_layer",
    "all_gather_context",
    "broadcast_data",
    "built_with",
    "checkpoint",
    "clip_grad_norm",
    "context_axis",
    "context_slices",
    "copy_to_model_parallel_region",
    "is_unique_param",
    "declare",
    "defer_init",
    "derive_seed",
    "destroy_model_parallel",
    "divide",
    "embedding",
    "exchange_rows",
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
    "is_split",
    "is_unitialized",
    "local_shard",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "needs_grad",
    "neighbours",
    "normal",
    "onednn_is_there",
    "ones",
    "own_tokens",
    "pad_sequence",
    "padded_vocab_size",
    "parallel_context",
    "reduce_from_model_parallel_region",
    "reduce_scatter_context",
    "reduce_scatter_to_sequence_parallel_region",
    "replicas_of",
    "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "seeded",
    "sequence_axis",
    "set_model_parallel_rank",
    "set_model_parallel_world_size",
    "sharded_by_zero",
    "skip_init",
    "spec_of",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_losses",
    "vocab_parallel_right",
    "whole_length",
    "whole_logits",
    "zeros",
]

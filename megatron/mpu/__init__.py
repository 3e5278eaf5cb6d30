"""Model-parallel utilities: this rank's place in the (pipe, data, model) grid, and sharded layers.

`initialize_model_parallel` builds the grid once. The constructor of a layer takes the layer's process groups from
the grid. Functions take plain values instead of a configuration object.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .._torch import onednn_is_there
from ..seeds import derive_seed
from .building import after_each_layer, built_with
from .cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_losses
from .current import (
    ParallelContext,
    defer_init,
    make_context,
    model_parallel_is_initialized,
    parallel_context,
    set_context,
    skip_init,
)
from .current import current_mesh as get_mesh
from .data import broadcast_data
from .dropout import Stream
from .fused_rows import FusedRows
from .grads import clip_grad_norm, grad_norm, is_split, is_unique_param
from .groups import (
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_io_parallel_group,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipe_parallel_group,
    get_pipe_parallel_rank,
    get_pipe_parallel_world_size,
)  # fmt: skip
from .layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding
from .linear import needs_grad
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)  # fmt: skip
from .megatron_compat import (
    checkpoint,
    divide,
    get_cuda_rng_tracker,
    is_unitialized,
    model_parallel_cuda_manual_seed,
    set_model_parallel_rank,
    set_model_parallel_world_size,
    split_tensor_along_last_dim,
)
from .mesh import TRIVIAL_AXIS, Axis, Coord, Mesh, Options, Topology
from .parameters import InitMethod, ParamSpec, declare, normal, ones, replicas_of, sharded_by_zero, spec_of, zeros
from .random import RngStreams, seeded
from .sequence import (
    gather_from_sequence_parallel_region,
    local_shard,
    pad_sequence,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    shard_sequence,
    whole_length,
)  # fmt: skip
from .subgroups import neighbours
from .vocab_shards import padded_vocab_size, wide_dtype
from .wide_sums import embedding

if TYPE_CHECKING:
    from .accuracy import vocab_parallel_right
    from .context import all_gather_context, context_slices, gather_context, reduce_scatter_context
    from .exchange import exchange_rows
    from .linear_cross_entropy import DeferredLogits, whole_logits
    from .traced import gather_partial_from_model_parallel_region


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
    world_size = dist.get_world_size()
    stages = max(pipe_parallel_size, 1)
    replica_ranks = model_parallel_size * stages  # ranks that together hold one copy of the model
    if world_size % (replica_ranks * context_parallel_size):
        context = ""
        if context_parallel_size > 1:
            context = f" times the context-parallel size {context_parallel_size}"
        raise ValueError(
            f"{world_size} ranks do not form a grid: the model-parallel size {model_parallel_size} times the "
            f"pipeline-parallel size {stages}{context} must divide the number of ranks"
        )
    data_size = world_size // replica_ranks  # includes context-parallel ranks, which hold copies of the weights, too
    topology = Topology(stages, data_size, model_parallel_size, context_parallel_size, expert_parallel_size)
    mesh = Mesh.build(topology)
    set_context(make_context(mesh, options, seed))
    return mesh


def destroy_model_parallel() -> None:
    """Forget the current mesh; its torch process groups stay open."""
    set_context(None)


def get_options() -> Options:
    """Return the options that layers built now would use."""
    return parallel_context().options


def get_rng() -> RngStreams:
    """Return the dropout streams that layers built now would draw from."""
    return parallel_context().rng


def sequence_axis() -> Axis:
    """Return the sequence-parallel axis for a layer that is built under the current setting.

    With sequence parallelism this is the model axis, otherwise an axis of this rank alone.
    """
    return parallel_context().sequence


def context_axis() -> Axis:
    """Return the context-parallel axis: the ranks that hold different tokens of the same samples."""
    return get_mesh().context


def get_topology() -> Topology:
    """Return the (pipe, data, model) grid of all ranks."""
    return get_mesh().topology


# Old name -> new name.
_NEW_NAMES = {
    "ALONE": "TRIVIAL_AXIS", "counts_here": "is_unique_param", "filled_later": "defer_init",
    "is_asked_for": "needs_grad", "own_tokens": "shard_sequence", "stretches": "context_slices",
    "sum_to_own_context": "reduce_scatter_context", "undrawn": "skip_init", "whole_context": "all_gather_context",
}  # fmt: skip

# Name -> module that defines it, which is imported when the name is used first; few runs need these modules.
_ON_FIRST_USE = {
    "DeferredLogits": "linear_cross_entropy", "all_gather_context": "context", "context_slices": "context",
    "exchange_rows": "exchange", "gather_context": "context", "gather_partial_from_model_parallel_region": "traced",
    "reduce_scatter_context": "context", "vocab_parallel_right": "accuracy", "whole_logits": "linear_cross_entropy",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import the module of `name`, or warn that it is a deprecated name, which the next minor version drops."""
        if name in _ON_FIRST_USE:
            value = getattr(import_module(f".{_ON_FIRST_USE[name]}", __name__), name)
            globals()[name] = value  # the next use finds it here
            return value
        if name not in _NEW_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"mpu.{name} is now mpu.{_NEW_NAMES[name]}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(__name__), _NEW_NAMES[name])


__all__ = [
    "TRIVIAL_AXIS", "Axis", "ColumnParallelLinear", "Coord", "DeferredLogits", "FusedRows", "InitMethod", "LayerNorm",
    "Mesh", "Options", "ParallelContext", "ParamSpec", "RngStreams", "RowParallelLinear", "Stream", "Topology",
    "VocabParallelEmbedding", "after_each_layer", "all_gather_context", "broadcast_data", "built_with", "checkpoint",
    "clip_grad_norm", "context_axis", "context_slices", "copy_to_model_parallel_region", "is_unique_param", "declare",
    "defer_init", "derive_seed", "destroy_model_parallel", "divide", "embedding", "exchange_rows", "gather_context",
    "gather_from_model_parallel_region", "gather_from_sequence_parallel_region",
    "gather_partial_from_model_parallel_region", "get_cuda_rng_tracker", "get_data_parallel_group",
    "get_data_parallel_rank", "get_data_parallel_world_size", "get_io_parallel_group", "get_mesh",
    "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_src_rank",
    "get_model_parallel_world_size", "get_options", "get_pipe_parallel_group", "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size", "get_rng", "get_topology", "grad_norm", "initialize_model_parallel", "is_split",
    "is_unitialized", "local_shard", "model_parallel_cuda_manual_seed", "model_parallel_is_initialized", "needs_grad",
    "neighbours", "normal", "onednn_is_there", "ones", "shard_sequence", "pad_sequence", "padded_vocab_size",
    "parallel_context", "reduce_from_model_parallel_region", "reduce_scatter_context",
    "reduce_scatter_to_sequence_parallel_region", "replicas_of", "scatter_to_model_parallel_region",
    "scatter_to_sequence_parallel_region", "seeded", "sequence_axis", "set_model_parallel_rank",
    "set_model_parallel_world_size", "sharded_by_zero", "skip_init", "spec_of", "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy", "vocab_parallel_losses", "vocab_parallel_right", "whole_length", "whole_logits",
    "wide_dtype", "zeros",
]  # fmt: skip

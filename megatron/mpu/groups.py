"""Ranks, sizes and process groups of the grid's axes, by the names of Megatron-LM's and DeepSpeed's `mpu`."""

import torch.distributed as dist

from .current import current_mesh
from .mesh import Axis, group_of_members


def get_model_parallel_rank() -> int:
    """Return this rank's index on the model axis (tensor parallelism)."""
    return current_mesh().model.rank


def get_model_parallel_world_size() -> int:
    """Return the number of ranks on the model axis (tensor parallelism)."""
    return current_mesh().model.size


def get_model_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the model axis (tensor parallelism)."""
    return _group(current_mesh().model)


def get_model_parallel_src_rank() -> int:
    """Return the global rank of this model-parallel group's first rank, the rank that reads the data."""
    return current_mesh().model.first


def get_data_parallel_rank(with_context_parallel: bool = True) -> int:
    """Return this rank's index on the data axis; ranks of one context-parallel group have consecutive indices.

    with_context_parallel: False for the index of this rank's replica, as by default in Megatron-core. The default here
    is what DeepSpeed, which calls this function without arguments, needs to sum gradients.
    """
    mesh = current_mesh()
    return mesh.data.rank if with_context_parallel else mesh.share.rank


def get_data_parallel_world_size(with_context_parallel: bool = True) -> int:
    """Return the number of ranks on the data axis, including context-parallel ranks.

    with_context_parallel: False for the number of replicas, each of which reads samples of its own, as by default in
    Megatron-core. See `get_data_parallel_rank`.
    """
    mesh = current_mesh()
    return mesh.data.size if with_context_parallel else mesh.share.size


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the data axis."""
    return _group(current_mesh().data)


def get_pipe_parallel_rank() -> int:
    """Return this rank's pipeline stage."""
    return current_mesh().pipe.rank


def get_pipe_parallel_world_size() -> int:
    """Return the number of pipeline stages."""
    return current_mesh().pipe.size


def get_pipe_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the pipe axis."""
    return _group(current_mesh().pipe)


def get_io_parallel_group() -> dist.ProcessGroup:
    """Return the process group of the ranks that read data.

    With a pipeline, these are the ranks with model-parallel rank 0 on the first and the last stage. The first
    call creates the group, so all these ranks must make it together. Without a pipeline, returns this rank's
    data-parallel group. Raises RuntimeError on a pipeline rank that reads no data.
    """
    grid = current_mesh().topology
    if grid.pipe == 1:
        return get_data_parallel_group()
    ranks = sorted({*grid.filter_match(pipe=0, model=0), *grid.filter_match(pipe=grid.pipe - 1, model=0)})
    if dist.get_rank() not in ranks:
        raise RuntimeError(
            f"rank {dist.get_rank()} reads no data, so it has no io-parallel group; only ranks {ranks} have one"
        )
    return group_of_members(tuple(ranks))


def _group(axis: Axis) -> dist.ProcessGroup:
    """Return the process group of `axis`; DeepSpeed requires one even for a single rank."""
    if axis.group is not None:
        return axis.group
    if dist.get_world_size() == 1:
        return dist.group.WORLD  # type: ignore[return-value]
    return group_of_members((dist.get_rank(),))

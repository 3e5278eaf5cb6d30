"""Sequence parallelism (Korthikanti et al. 2022): between sharded layers each rank holds a shard of the sequence.

                     forward                      backward
    gather           all-gather                   reduce-scatter     before a column-parallel matmul
    reduce-scatter   sum, keep local shard        all-gather         after a row-parallel matmul
    scatter          keep local shard             all-gather

An all-gather and a reduce-scatter together move as many bytes as the all-reduce that they replace. The work of
norms and dropout, and the activations that they save, shrink to 1/t.
Shapes: s sequence, always the first dimension; t model-parallel ranks.
axis: the ranks over which the sequence is sharded, by default those of the current mesh and options. With one
rank (no sequence parallelism) all functions are no-ops.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import mappings
from .current import parallel_context
from .mesh import Axis


def shard_length(length: int, axis: Axis) -> int:
    """Return `length` / number of ranks. Raises ValueError, naming the flags, if the division leaves a remainder."""
    if length % axis.size:
        raise ValueError(
            f"--sequence-parallel cannot split a sequence of {length} tokens over {axis.size} model-parallel ranks; "
            f"make --seq-length a multiple of {axis.size}, or pad each micro-batch with mpu.pad_sequence()"
        )
    return length // axis.size


def pad_sequence(x: Tensor, filler: int, dim: int = 1, axis: Axis | None = None) -> Tensor:
    """Pad `x` with `filler` along `dim` to a multiple of the number of ranks: [..., s, ...] -> [..., s + padding, ...].

    Returns `x` itself if no padding is needed.
    """
    axis = axis or parallel_context().sequence
    padding = -x.shape[dim] % axis.size  # for example, 7 tokens on 4 ranks: -7 % 4 = 1
    if not padding:
        return x
    shape = list(x.shape)
    shape[dim] = padding
    return torch.cat([x, x.new_full(shape, filler)], dim)


def whole_length(x: Tensor, axis: Axis | None = None) -> int:
    """Return the length s of the whole sequence; x is [s, ...] or, with sequence parallelism, [s/t, ...]."""
    axis = axis or parallel_context().sequence
    return x.shape[0] * axis.size


@dataclass
class Pending:
    """Collective in progress; `wait()` returns its result.

    work: None if there is no communication to wait for. num_shards: number of shards of `result` that `wait` must still
    sum; 0 if there is nothing to sum.
    """

    work: dist.Work | None
    result: Tensor
    num_shards: int = 0

    def block(self) -> None:
        """Wait until the collective has finished."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def wait(self) -> Tensor:
        """Wait and return the result: [s, ...] of an all-gather or all-reduce, [s/t, ...] of a reduce-scatter."""
        self.block()
        if not self.num_shards:
            return self.result
        # The result has every rank's values for this rank's shard, one after the other.
        return self.result.view(self.num_shards, -1, *self.result.shape[1:]).sum(0)


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start gathering [s/t, ...] of each rank into [s, ...] on every rank."""
    whole = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    # Renamed in torch 2.13. A trace replaces the functions of `dist`, so they are looked up at each call.
    all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    work = all_gather(whole, x.contiguous(), group=axis.group, async_op=True)
    return Pending(work, whole)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Start summing [s, ...] over the ranks into this rank's shard [s/t, ...].

    Raises ValueError if the number t of ranks does not divide the length s.
    """
    length = shard_length(x.shape[0], axis)
    x = x.contiguous()
    if x.device.type == "cpu":
        # gloo's reduce-scatter is a full all-reduce; an all-to-all of the shards moves half as many bytes.
        shards = torch.empty_like(x)
        work = dist.all_to_all_single(shards, x, group=axis.group, async_op=True)
        return Pending(work, shards, num_shards=axis.size)
    own_shard = x.new_empty(length, *x.shape[1:])
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    work = reduce_scatter(own_shard, x, group=axis.group, async_op=True)
    return Pending(work, own_shard)


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start summing x [...] over the ranks in place; with one rank, the result is `x` itself."""
    work = None
    if axis.size > 1:
        work = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(work, x)


def local_shard(x: Tensor, dim: int = 0, axis: Axis | None = None) -> Tensor:
    """Return this rank's shard of `x` along `dim`: [..., s, ...] -> [..., s/t, ...].

    Without sequence parallelism this is `x` itself.
    """
    axis = axis or parallel_context().sequence
    if axis.size == 1:
        return x
    length = shard_length(x.shape[dim], axis)
    return x.narrow(dim, axis.rank * length, length)


def shard_sequence(x: Tensor, dim: int, axis: Axis) -> Tensor:
    """Return this context-parallel rank's tokens of `x` along `dim`: [..., s, ...] -> [..., s/c, ...] on c ranks.

    Returns `x` itself on an axis of one rank. Raises ValueError unless 2c divides the length s.
    """
    if axis.size == 1:
        return x
    from .context import context_slices

    slices = context_slices(x.shape[dim], axis)
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in slices], dim)


def _all_gather_now(x: Tensor, axis: Axis) -> Tensor:
    return start_all_gather(x, axis).wait()


def _reduce_scatter_now(x: Tensor, axis: Axis) -> Tensor:
    return start_reduce_scatter(x, axis).wait()


def _local_shard_copy(x: Tensor, axis: Axis) -> Tensor:
    return local_shard(x, 0, axis).contiguous()


def gather_from_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """All-gather [s/t, ...] -> [s, ...]; the backward pass reduce-scatters. A no-op without sequence parallelism."""
    return mappings.apply_on_axis(x, axis or parallel_context().sequence, _all_gather_now, _reduce_scatter_now)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """Reduce-scatter partial sums [s, ...] -> [s/t, ...]; the backward pass all-gathers."""
    return mappings.apply_on_axis(x, axis or parallel_context().sequence, _reduce_scatter_now, _all_gather_now)


def scatter_to_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """Keep this rank's shard of a replicated tensor: [s, ...] -> [s/t, ...]; the backward pass all-gathers."""
    return mappings.apply_on_axis(x, axis or parallel_context().sequence, _local_shard_copy, _all_gather_now)

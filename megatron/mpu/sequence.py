"""Sequence parallelism: between split layers each model-parallel rank has a stretch of the sequence (Korthikanti et al. 2022).

                     forward                      backward
    gather           all-gather                   reduce-scatter     before a product split by columns
    reduce-scatter   sum, keep local shard        all-gather         after a product split by rows
    scatter          keep local shard             all-gather

The pairs say as much as the all-reduces that they stand for; norms, dropout and what is kept for the backward
pass shrink to one t-th. Shapes: s sequence, always the first dimension; t model-parallel ranks.
axis: the ranks that share the sequence out, by default those of the options and the mesh that are entered. With one rank
(no sequence parallelism) nothing happens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import mappings
from .mesh import Axis, surroundings

# The newer names of the same two collectives, where torch has them.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def stretch_length(length: int, axis: Axis) -> int:
    """s / t. Raises ValueError, naming the knobs, if t does not divide s."""
    if length % axis.size:
        raise ValueError(
            f"--sequence-parallel cannot split a sequence of {length} tokens over {axis.size} model-parallel ranks; make "
            f"--seq-length a multiple of {axis.size}, or pad each micro-batch with mpu.pad_sequence()"
        )
    return length // axis.size


def pad_sequence(x: Tensor, filler: int, dim: int = 1, axis: Axis | None = None) -> Tensor:
    """[..., s, ...] -> [..., s + padding, ...]: `x` with as many `filler` after it along `dim` as the ranks need to share it out evenly; itself otherwise."""
    axis = axis or surroundings().sequence
    missing = -x.shape[dim] % axis.size
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, filler)], dim)


def whole_length(x: Tensor, axis: Axis | None = None) -> int:
    """s of the whole sequence that `x` [s, ...] or, with sequence parallelism, [s/t, ...] is of."""
    axis = axis or surroundings().sequence
    return x.shape[0] * axis.size


class Pending:
    """A collective under way; `wait()` gives its result. work: None where there is nobody to wait for."""

    def __init__(self, work: dist.Work | None, result: Tensor, parts: int = 0) -> None:
        self._work, self._result, self._parts = work, result, parts

    def settle(self) -> None:
        """Until the collective is over."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def wait(self) -> Tensor:
        """Its result, [s, ...] or [s/t, ...] as whoever started it says."""
        self.settle()
        return self._result.view(self._parts, -1, *self._result.shape[1:]).sum(0) if self._parts else self._result


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """[s/t, ...] on each rank -> [s, ...] on every rank."""
    whole = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    return Pending(_all_gather(whole, x.contiguous(), group=axis.group, async_op=True), whole)


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """[s, ...] partial sums -> [s/t, ...], this rank's stretch of their total. Raises ValueError as `stretch_length`."""
    length = stretch_length(x.shape[0], axis)
    x = x.contiguous()
    if x.device.type == "cpu":
        # gloo makes a reduce-scatter of a whole all-reduce; sending each rank its stretches moves half of the bytes.
        parts = torch.empty_like(x)
        return Pending(dist.all_to_all_single(parts, x, group=axis.group, async_op=True), parts, axis.size)
    mine = x.new_empty(length, *x.shape[1:])
    return Pending(_reduce_scatter(mine, x, group=axis.group, async_op=True), mine)


def local_shard(x: Tensor, dim: int = 0, axis: Axis | None = None) -> Tensor:
    """[..., s, ...] -> [..., s/t, ...], this rank's stretch of `x` along `dim`; all of it without sequence parallelism."""
    axis = axis or surroundings().sequence
    if axis.size == 1:
        return x
    length = stretch_length(x.shape[dim], axis)
    return x.narrow(dim, axis.rank * length, length)


def _all_gather_now(x: Tensor, axis: Axis) -> Tensor:
    return start_all_gather(x, axis).wait()


def _reduce_scatter_now(x: Tensor, axis: Axis) -> Tensor:
    return start_reduce_scatter(x, axis).wait()


def _keep_own(x: Tensor, axis: Axis) -> Tensor:
    return local_shard(x, 0, axis).contiguous()


def gather_from_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[s/t, ...] -> [s, ...]; partial gradients are summed on the way back. Nothing without sequence parallelism."""
    return _apply(x, axis, _all_gather_now, _reduce_scatter_now)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[s, ...] partial sums -> [s/t, ...], this rank's stretch of their total."""
    return _apply(x, axis, _reduce_scatter_now, _all_gather_now)


def scatter_to_sequence_parallel_region(x: Tensor, axis: Axis | None = None) -> Tensor:
    """[s, ...], the same on all ranks -> [s/t, ...]."""
    return _apply(x, axis, _keep_own, _all_gather_now)


def _apply(x: Tensor, axis: Axis | None, there: mappings.Way, back: mappings.Way) -> Tensor:
    axis = axis or surroundings().sequence
    return mappings.over_ranks(x, axis, there, back) if axis.size > 1 else x

"""Reduction of gradients over the replicas during the backward pass, for optimizers without sharded states.

This follows torch's DistributedDataParallel (Li et al. 2020). DeepSpeed without ZeRO starts to reduce only when
all gradients exist.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._torch import to_device
from .bucket_launch import BucketLauncher, ChunkOf, pack_buckets, sort_buckets
from .distributed_optimizer import DistributedOptimizer
from .param_replicas import group_by_holders
from .patches import is_reduction_replaced
from .reductions import Reduction
from .schedule import Backward, BackwardWeight, Instruction
from .sequential import chunk_of_weights
from .sparse import dense_gradient, sparse_weights, sum_sparse


@dataclass(eq=False)
class _GradBucket:
    """A bucket of weights; `.grad` becomes the sum over the replicas, or None if no replica has a gradient."""

    parameters: list[nn.Parameter]
    group: Any
    _work: dist.Work | None = None
    # Weights without a gradient on this replica, each with the number of replicas that have one.
    _missing: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)

    def add(self, parameter: nn.Parameter) -> None:
        """Do nothing, because `reduce` reads `.grad` directly."""

    def reduce(self) -> None:
        """Start the all-reduce; gradients become views of its buffer, so nothing is copied back."""
        has_grad = [p.grad is not None for p in self.parameters]
        grads = list(map(dense_gradient, self.parameters))
        # After the gradients comes a 1 for each weight with a gradient, so the sums are numbers of replicas. For
        # example, with gradients [a, b] of a first weight and none of a second one of one element: [a, b, 0, 1, 0].
        present = to_device(has_grad, grads[0].device).to(grads[0].dtype)  # the host does not wait
        flat_grads = [grad.reshape(-1) for grad in grads]
        flat = torch.cat([*flat_grads, present])
        self._work = dist.all_reduce(flat, group=self.group, async_op=True)

        # The gradients become views of `flat`, which has the sums after wait().
        counts = flat[-len(grads) :]  # how many replicas have a gradient of each weight
        self._missing = []
        begin = 0
        for index, p in enumerate(self.parameters):
            end = begin + p.numel()
            p.grad = flat[begin:end].view_as(p)
            begin = end
            if not has_grad[index]:
                self._missing.append((p, counts[index]))

    def wait(self) -> None:
        """Wait until the sums have arrived."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        if self._missing:  # only in this case, the host waits for the device
            counts = torch.stack([count for _, count in self._missing]).tolist()
            for (p, _), count in zip(self._missing, counts, strict=True):
                if not count:
                    p.grad = None
        self._missing = []


@dataclass
class GradReducer:
    """Gradient reduction: call `arm()` before a step's last backward pass and `finish()` after it.

    After `finish()`, each `.grad` is the sum over the replicas that hold the weight (see param_replicas.py).

    module: its weights may be frozen, replaced or converted between steps. group: process group of the replicas.
    bucket_bytes: minimum bytes of gradients in a bucket; None: depends on the number of replicas. chunk_of: for a
    stage with several chunks, the chunk of each weight.
    """

    module: nn.Module
    group: Any
    bucket_bytes: int | None = None
    chunk_of: ChunkOf = field(default_factory=dict)
    gradient_share = None  # unlike a DistributedOptimizer, which keeps gradients elsewhere, it reduces `.grad`

    def __post_init__(self) -> None:
        self._signature: list[Any] = []  # of the weights in the buckets
        self._launcher = BucketLauncher((), {})  # without buckets, for `_current_launcher` to close
        self._current_launcher()  # makes the first buckets now; later calls make new ones only if weights have changed

    def _current_launcher(self) -> BucketLauncher:
        """Return the launcher; pack the weights into new buckets if any was frozen, unfrozen, replaced or converted."""
        self._sparse = sparse_weights(self.module)  # not in buckets, reduced last
        sparse = set(self._sparse)
        trainable = [p for p in self.module.parameters() if p.requires_grad and p not in sparse]
        signature = [(id(p), p.dtype, p.device, p.shape) for p in trainable]
        if signature == self._signature:
            return self._launcher
        self._launcher.close()
        self._signature = signature
        buckets = []
        for group, weights in group_by_holders(trainable, self.group):
            for parameters in pack_buckets(weights, group, self.bucket_bytes, self.chunk_of):
                buckets.append(_GradBucket(parameters, group))
        sort_buckets(buckets, trainable, self.chunk_of)
        self._launcher = BucketLauncher(buckets, self.chunk_of)
        return self._launcher

    def arm(self, chunk: int = 0) -> None:
        """Overlap the reduction with the next backward pass of `chunk`, which must be the chunk's last of this step."""
        self._current_launcher().arm(chunk)

    def finish(self) -> None:
        """Reduce the remaining gradients and wait for all reductions of this step."""
        self._current_launcher().finish()
        sum_sparse(self._sparse, self.group)


class OverlappedReduction(Reduction):
    """Reduction over the replicas during the last backward pass, by a GradReducer or a DistributedOptimizer."""

    averages = False

    def __init__(self, engine: Any, reducer: GradReducer | DistributedOptimizer) -> None:
        super().__init__(engine)
        self.reducer = reducer
        self._may_arm = engine._config.pipeline.get("overlap_grad_reduce", True)

    def plan(self, instructions: Sequence[Instruction]) -> None:
        """Find the last pass of each chunk that computes weight gradients in a step."""
        # A later pass of a chunk replaces the earlier ones in this dict.
        self._last_passes = {each.chunk: each for each in instructions if isinstance(each, (Backward, BackwardWeight))}

    @contextmanager
    def accumulating(self, instruction: Instruction) -> Iterator[None]:
        """Run a backward pass in this block; if it is its chunk's last one, the reductions start during the pass."""
        if self._may_arm and self._last_passes[instruction.chunk] is instruction:
            self.reducer.arm(instruction.chunk)
        yield

    def finish(self) -> None:
        """Wait for the reductions over the replicas, then sum the gradients of tied weights over their stages."""
        self.reducer.finish()
        self.reduce_tied_grads(self.reducer.gradient_share)


def choose_reduction(engine: Any) -> Reduction:
    """Return the Reduction that a new pipeline engine needs for its optimizer and precision.

    Collective over the stages. Raises ValueError if DeepSpeed's optimizer leaves the gradients of tied weights where
    they cannot be summed.
    """
    if engine.distributed:
        return OverlappedReduction(engine, engine.distributed)
    if _may_overlap(engine):
        group = engine.grid.get_data_parallel_group()
        return OverlappedReduction(engine, GradReducer(engine.module, group, chunk_of=chunk_of_weights(engine.module)))
    if engine.has_wrapped_optimizer:
        from .zero_reductions import reduction_by_deepspeed

        return reduction_by_deepspeed(engine)
    return Reduction(engine)


def _may_overlap(engine: Any) -> bool:
    """Return whether a GradReducer may replace DeepSpeed's reduction after the backward passes.

    A GradReducer needs fp32, several replicas, no ZeRO, and no ds_config settings that change DeepSpeed's reduction.
    """
    config = engine._config
    conditions = (
        not engine.has_wrapped_optimizer,  # fp32 without ZeRO
        engine.dp_world_size > 1,
        config.communication_data_type in (None, torch.float64),  # `use_fp64` sets float64
        not config.prescale_gradients,
        config.gradient_predivide_factor == 1.0,
        engine.gradient_average,
        engine.pipeline_enable_backward_allreduce,
        not config.torch_autocast_enabled,
        config.pipeline.get("overlap_grad_reduce", True),
        not is_reduction_replaced(type(engine)),
    )
    return all(conditions)

"""Sums of gradients over replicas and over the stages of tied weights; a missing gradient stays None, not zero.

AdamW decays a weight whose gradient is zero, but leaves a weight without a gradient unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .groups import host_group
from .mistakes import refuse_untrained
from .patches import instruction_handler
from .pipe import ties
from .schedule import Instruction
from .sparse import sparse_weights, sum_sparse

GradientOf = Callable[[nn.Parameter], Tensor | None]


def any_over_ranks(flags: Sequence[bool], group: Any) -> list[bool]:
    """Return for each flag whether it is set on any rank of the group. Collective, unless there are no flags."""
    if not flags:
        return []
    any_flags = torch.tensor(flags, dtype=torch.int32)
    dist.all_reduce(any_flags, op=dist.ReduceOp.MAX, group=host_group(group))
    return list(map(bool, any_flags.tolist()))


class Reduction:
    """Summation of a pipeline engine's gradients: over the replicas, then over the stages of each tied weight.

    `accumulating` surrounds each backward pass and `finish` follows the last one. This class lets DeepSpeed reduce
    over the replicas after the last backward pass (fp32 without ZeRO); its subclasses, of which some are in
    zero_reductions.py, reduce in other ways.

    Summing over replicas first makes all copies of a tied weight bitwise equal. DeepSpeed sums over stages first; then
    the rounding of a sum over replicas depends on the weight's position in a message, which differs between stages.
    """

    averages = True  # whether gradients are averaged over the replicas, not summed

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._module = engine.module
        self._replicas = engine.grid.get_data_parallel_group()

    def plan(self, instructions: Sequence[Instruction]) -> None:
        """Prepare for steps that run these instructions of this stage."""

    @contextmanager
    def accumulating(self, instruction: Instruction) -> Iterator[None]:
        """Run a backward pass in this block; subclasses do the optimizer's work before and after it."""
        yield

    def reduce_over_replicas(self) -> None:
        """Let DeepSpeed, or a user's function in place of DeepSpeed's, sum the gradients over the replicas."""
        # DeepSpeed's method ends in `PipelineHooks.buffered_allreduce_fallback`.
        instruction_handler(self._engine, "ReduceGrads", "_exec_reduce_grads")()

    def finish(self) -> None:
        """Sum the gradients of a step, after its last backward pass."""
        self.reduce_over_replicas()
        self.reduce_tied_grads()

    def reduce_tied_grads(self, gradient_of: GradientOf | None = None) -> None:
        """Sum the gradients of each tied weight over its stages. Collective over these stages.

        A weight that has a gradient on any of its stages gets the sum on all its stages. A weight without a gradient on
        all its stages (frozen, or unused in this step) stays without one, so no optimizer decays it.

        gradient_of: returns the gradient of a weight, for gradients that are not in `.grad`.
        Raises RuntimeError if a weight is frozen on one stage and trained on another.
        """
        reads_dot_grad = gradient_of is None
        sparse: set[nn.Parameter] = set()
        if gradient_of is None:
            gradient_of = attrgetter("grad")
            sparse.update(sparse_weights(self._module))  # only `.grad` may be sparse
        for key, group, weights in ties(self._module):
            grads = list(map(gradient_of, weights.values()))
            trained_anywhere = any_over_ranks([grad is not None for grad in grads], group)
            for (name, weight), grad, is_trained in zip(weights.items(), grads, trained_anywhere, strict=True):
                if not is_trained:
                    continue
                # A given `gradient_of` returns None only for a weight that this stage's optimizer does not have.
                is_only_elsewhere = grad is None and not reads_dot_grad
                refuse_untrained(weight, f"{key}.{name}", self._engine.stage_id, is_only_elsewhere)
                if weight in sparse:
                    sum_sparse([weight], group)
                    continue
                if grad is None:  # this stage did not use the weight in this step
                    grad = weight.grad = torch.zeros_like(weight)
                dist.all_reduce(grad, group=group)

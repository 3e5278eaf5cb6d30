"""Reductions of gradients by DeepSpeed's bf16 and ZeRO optimizers, and by its engine without a pipeline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ._deepspeed import bf16_sums
from .clip import trainable_weights
from .pipe import tied_weights, ties
from .reductions import Reduction, any_over_ranks
from .schedule import Instruction
from .sparse import empty_gradient, sparse_weights


def _weights_with_grad(weights: Sequence[nn.Parameter], group: Any) -> list[nn.Parameter]:
    """Return the weights that have a gradient on any rank of the group. Collective, unless there are no weights."""
    has_grad = any_over_ranks([weight.grad is not None for weight in weights], group)
    return list(compress(weights, has_grad))


@contextmanager
def keep_missing_grads(module: nn.Module, replicas: Any) -> Iterator[None]:
    """Run a reduction in this block, then remove the zeros that it filled in for gradients that no replica has."""
    weights = trainable_weights(module)
    with_grad = set(_weights_with_grad(weights, replicas))
    for weight in sparse_weights(module):
        if weight.grad is None:  # DeepSpeed's dense zeros would not match the sparse gradients of other replicas
            weight.grad = empty_gradient(weight)
    yield
    for weight in weights:
        if weight not in with_grad:
            weight.grad = None


def fill_missing_grads(weights: Sequence[nn.Parameter], replicas: Any) -> list[nn.Parameter]:
    """Set a missing gradient to zeros if another replica has it; return the weights with a gradient on any replica.

    Collective. ZeRO packs gradients one after another and leaves out missing ones. Without these zeros, the buckets of
    the replicas would not match.
    """
    with_grad = _weights_with_grad(weights, replicas)
    for weight in with_grad:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    return with_grad


class Bf16Reduction(Reduction):
    """Reduction of the fp32 gradient sums of DeepSpeed's bf16 optimizer."""

    @contextmanager
    def accumulating(self, instruction: Instruction) -> Iterator[None]:
        optimizer = self._engine.optimizer
        optimizer.clear_lp_grads()
        yield
        if not optimizer.immediate_grad_update:
            optimizer.update_hp_grads(clear_lp_grads=False)

    def finish(self) -> None:
        """Sum the gradients over the replicas, then those of tied weights over their stages."""
        self.reduce_over_replicas()
        # Weight -> its fp32 gradient sum, and a flag that is True if the weight has a gradient in this step.
        sums = bf16_sums(self._engine.optimizer)
        # A frozen weight has no sum.
        self.reduce_tied_grads(lambda weight: sums[weight].gradient if weight in sums else None)
        for _, group, weights in ties(self._module):
            tied = [sums[weight] for weight in weights.values() if weight in sums]
            flags = [each.flags[each.position] for each in tied]
            has_grad = any_over_ranks(flags, group)
            # A weight with a gradient on one stage must be counted and clipped on all of its stages.
            for grad_sum, is_set in zip(tied, has_grad, strict=True):
                grad_sum.flags[grad_sum.position] = is_set


class ZeroReduction(Reduction):
    """Reduction by ZeRO's optimizers, after tied gradients have been summed over their stages.

    After ZeRO's reduction, each rank has only a shard of the sum over replicas. So tied gradients are summed over their
    stages before ZeRO's reduction. With three or more replicas, tied gradients are first summed over the replicas and
    then over the stages, so that all stages round equally. One replica then passes the complete sum to ZeRO, and the
    other replicas pass zeros.
    """

    def finish(self) -> None:
        """Sum the gradients of tied weights over replicas and stages, then let ZeRO reduce all gradients.

        ZeRO leaves each rank only a shard of the sums, so the stages must sum tied gradients before.
        """
        tied = tied_weights(self._module)
        replicas = self._replicas
        sums_first = dist.get_world_size(replicas) > 2  # a sum over two replicas rounds equally in any order
        if sums_first:
            for weight in fill_missing_grads(tied, replicas):
                dist.all_reduce(weight.grad, group=replicas)
        self.reduce_tied_grads()
        if sums_first and dist.get_rank(replicas):
            # ZeRO will sum over the replicas once more, so only the first replica keeps the complete sum.
            for weight in tied:
                if weight.grad is not None:
                    weight.grad.zero_()
        fill_missing_grads(trainable_weights(self._module), replicas)
        self.reduce_over_replicas()


def reduction_by_deepspeed(engine: Any) -> Reduction:
    """Return the Reduction for a DeepSpeed optimizer that wraps the user's. Collective over the stages.

    Raises ValueError if it leaves the gradients of tied weights where they cannot be summed.
    """
    if engine.using_bf16_optimizer:
        return Bf16Reduction(engine)
    if not engine.zero_optimization():
        return Reduction(engine)
    # Stages without tied weights raise, too; else they would wait for the others.
    has_ties = [bool(tied_weights(engine.module))]
    hides_grads = engine.optimizer.use_grad_accum_attribute  # gradients are in `grad_accum` of a weight, not in `grad`
    if hides_grads and any(any_over_ranks(has_ties, engine.grid.get_pipe_parallel_group())):
        raise ValueError(
            "with bf16 and offload_optimizer, DeepSpeed keeps gradients where a pipeline cannot sum those of tied "
            'weights: leave "offload_optimizer" out of the ds_config, use fp32, or do not tie weights across stages'
        )
    return ZeroReduction(engine)

"""Sums of gradients over replicas and over the stages of tied weights; a missing gradient stays None, not zero.

AdamW decays a weight whose gradient is zero, but leaves a weight without a gradient unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import bf16_sums, this_device
from .distributed_optimizer import DistributedOptimizer
from .patches import instruction_of, is_reduction_replaced
from .pipe import chunk_of_weights, tied_weights, ties
from .reducer import GradReducer
from .schedule import Backward, BackwardWeight, Instruction
from .sparse import empty_gradient, sparse_weights, sum_sparse

GradientOf = Callable[[nn.Parameter], Tensor | None]


def _anywhere(flags: Sequence[bool], group: Any) -> list[bool]:
    """Return for each flag whether it is set on any rank of the group. Collective, unless there are no flags."""
    if not flags:
        return []
    there = torch.tensor(flags, dtype=torch.int32, device=this_device())
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
    return [bool(each) for each in there.tolist()]


def _with_gradient(weights: Sequence[nn.Parameter], group: Any) -> list[nn.Parameter]:
    """Return the weights that have a gradient on any rank of the group. Collective, unless there are no weights."""
    return list(compress(weights, _anywhere([weight.grad is not None for weight in weights], group)))


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


@contextmanager
def keep_missing_grads(module: nn.Module, replicas: Any) -> Iterator[None]:
    """Run a reduction in this block, then remove the zeros that it filled in for gradients that no replica has."""
    weights = _trainable(module)
    learned = set(_with_gradient(weights, replicas))
    for weight in sparse_weights(module):
        if weight.grad is None:  # DeepSpeed's dense zeros would not match the sparse gradients of other replicas
            weight.grad = empty_gradient(weight)
    yield
    for weight in weights:
        if weight not in learned:
            weight.grad = None


def fill_for_replicas(weights: Sequence[nn.Parameter], replicas: Any) -> list[nn.Parameter]:
    """Set a missing gradient to zeros if another replica has it; return the weights with a gradient on any replica.

    Collective. ZeRO packs gradients one after another and leaves out missing ones. Without these zeros, the buckets of
    the replicas would not match.
    """
    learned = _with_gradient(weights, replicas)
    for weight in learned:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return learned


def reduce_tied_grads(module: Any, stage: int, gradient: GradientOf | None = None) -> None:
    """Sum the gradients of each tied weight over its stages. Collective over these stages.

    A weight that has a gradient on any of its stages gets the sum on all its stages. A weight without a gradient on all
    its stages (frozen, or unused in this step) stays without one, so no optimizer decays it.

    gradient: returns the gradient of a weight, for gradients that are not in `.grad`.
    Raises RuntimeError if a weight is frozen on one stage and trained on another.
    """
    sparse = set() if gradient else set(sparse_weights(module))
    for key, group, weights in ties(module):
        grads = [gradient(weight) if gradient else weight.grad for weight in weights.values()]
        learned = _anywhere([grad is not None for grad in grads], group)
        for (name, weight), grad, learns in zip(weights.items(), grads, learned, strict=True):
            if not learns:
                continue
            _refuse_untrained(weight, f"{key}.{name}", stage, grad is None and gradient is not None)
            if weight in sparse:
                sum_sparse([weight], group)
                continue
            if grad is None:
                weight.grad = torch.zeros_like(weight)
                grad = weight.grad
            dist.all_reduce(grad, group=group)


def _refuse_untrained(weight: nn.Parameter, name: str, stage: int, is_elsewhere: bool) -> None:
    """Raise RuntimeError if a tied weight that another stage trains is not trained on this stage.

    is_elsewhere: whether only the optimizers of other stages have the weight.
    """
    if not weight.requires_grad:
        raise RuntimeError(
            f"the tied weight {name} is frozen on stage {stage} but trained on another stage: freeze it on all of its "
            f"stages or on none"
        )
    if is_elsewhere:
        raise RuntimeError(
            f"the tied weight {name} is in the optimizer of another stage but not in that of stage {stage}: pass the "
            f"weight to the optimizers of both stages"
        )


class Reduction:
    """Summation of a pipeline engine's gradients: over the replicas, then over the stages of each tied weight.

    `accumulating` surrounds each backward pass and `finish` follows the last one. This class lets DeepSpeed reduce
    over the replicas after the last backward pass (fp32 without ZeRO); its subclasses reduce in other ways.

    Summing over replicas first makes all copies of a tied weight bitwise equal. DeepSpeed sums over stages first. In
    that order, the rounding of a sum over three or more replicas depends on the weight's position in a message, which
    differs between stages.
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

    def over_replicas(self) -> None:
        """Let DeepSpeed, or a user's function in place of DeepSpeed's, sum the gradients over the replicas."""
        instruction_of(self._engine, "ReduceGrads", "_exec_reduce_grads")()

    def finish(self) -> None:
        """Sum the gradients of a step, after its last backward pass."""
        self.over_replicas()
        reduce_tied_grads(self._module, self._engine.stage_id)


class Overlapped(Reduction):
    """Reduction over the replicas during the last backward pass, by a GradReducer or a DistributedOptimizer."""

    averages = False

    def __init__(self, engine: Any, reducer: GradReducer | DistributedOptimizer) -> None:
        super().__init__(engine)
        self.reducer = reducer
        self._may_arm = bool(engine._config.pipeline.get("overlap_grad_reduce", True))

    def plan(self, instructions: Sequence[Instruction]) -> None:
        """Find the last pass of each chunk that computes weight gradients in a step."""
        self._last = {each.chunk: each for each in instructions if isinstance(each, (Backward, BackwardWeight))}

    @contextmanager
    def accumulating(self, instruction: Instruction) -> Iterator[None]:
        if self._may_arm and self._last[instruction.chunk] is instruction:
            self.reducer.arm(instruction.chunk)
        yield

    def finish(self) -> None:
        self.reducer.finish()
        share = self.reducer.gradient_share if isinstance(self.reducer, DistributedOptimizer) else None
        reduce_tied_grads(self._module, self._engine.stage_id, share)


class Bf16(Reduction):
    """Reduction of the fp32 gradient sums of DeepSpeed's bf16 optimizer."""

    @contextmanager
    def accumulating(self, instruction: Instruction) -> Iterator[None]:
        optimizer = self._engine.optimizer
        optimizer.clear_lp_grads()
        yield
        if not optimizer.immediate_grad_update:
            optimizer.update_hp_grads(clear_lp_grads=False)

    def finish(self) -> None:
        self.over_replicas()
        sums = bf16_sums(self._engine.optimizer)
        reduce_tied_grads(self._module, self._engine.stage_id, lambda w: sums[w].gradient if w in sums else None)
        for _, group, weights in ties(self._module):
            tied = [sums[weight] for weight in weights.values() if weight in sums]
            learned = _anywhere([each.flags[each.at] for each in tied], group)
            # A weight with a gradient on one stage must be counted and clipped on all of its stages.
            for each, learns in zip(tied, learned, strict=True):
                each.flags[each.at] = learns


class Zero(Reduction):
    """Reduction by ZeRO's optimizers, after tied gradients have been summed over their stages.

    After ZeRO's reduction, each rank has only a shard of the sum over replicas. So tied gradients are summed over their
    stages before ZeRO's reduction. With three or more replicas, tied gradients are first summed over the replicas and
    then over the stages, so that all stages round equally. One replica then passes the complete sum to ZeRO, and the
    other replicas pass zeros.
    """

    def finish(self) -> None:
        tied = tied_weights(self._module)
        several = dist.get_world_size(self._replicas) > 2  # a sum over two replicas rounds equally in any order
        if several:
            for weight in fill_for_replicas(tied, self._replicas):
                dist.all_reduce(weight.grad, group=self._replicas)
        reduce_tied_grads(self._module, self._engine.stage_id)
        if several and dist.get_rank(self._replicas):
            for weight in tied:
                if weight.grad is not None:
                    weight.grad.zero_()
        fill_for_replicas(_trainable(self._module), self._replicas)
        self.over_replicas()


def reduction_of(engine: Any) -> Reduction:
    """Return the Reduction that a new pipeline engine needs for its optimizer and precision.

    Collective over the stages. Raises ValueError if DeepSpeed's optimizer leaves the gradients of tied weights where
    they cannot be summed.
    """
    if engine.distributed:
        return Overlapped(engine, engine.distributed)
    if _may_overlap(engine):
        replicas = engine.grid.get_data_parallel_group()
        return Overlapped(engine, GradReducer(engine.module, replicas, chunk_of=chunk_of_weights(engine.module)))
    if engine.using_bf16_optimizer:
        return Bf16(engine)
    elsewhere = engine.zero_optimization() and engine.optimizer.use_grad_accum_attribute
    # Stages without tied weights raise, too; else they would wait for the others.
    if elsewhere and any(_anywhere([bool(tied_weights(engine.module))], engine.grid.get_pipe_parallel_group())):
        raise ValueError(
            "with bf16 and offload_optimizer, DeepSpeed keeps gradients where a pipeline cannot sum those of tied "
            'weights: leave "offload_optimizer" out of the ds_config, use fp32, or do not tie weights across stages'
        )
    return Zero(engine) if engine.zero_optimization() else Reduction(engine)


def _may_overlap(engine: Any) -> bool:
    """Return whether a GradReducer may replace DeepSpeed's reduction after the backward passes.

    A GradReducer needs fp32, several replicas, no ZeRO, and no ds_config settings that change DeepSpeed's reduction.
    """
    config = engine._config
    asked = config.communication_data_type not in (None, torch.float64)  # `use_fp64` sets float64, which is no obstacle
    asked |= config.prescale_gradients or config.gradient_predivide_factor != 1.0 or not engine.gradient_average
    return bool(
        not engine.has_wrapped_optimizer
        and engine.dp_world_size > 1
        and not asked
        and engine.pipeline_enable_backward_allreduce
        and not config.torch_autocast_enabled
        and config.pipeline.get("overlap_grad_reduce", True)
        and not is_reduction_replaced(type(engine))
    )

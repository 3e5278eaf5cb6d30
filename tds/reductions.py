"""Reduction of gradients that keeps missing ones missing, rather than zero.

AdamW decays a weight whose gradient is zero, but leaves a weight without a gradient unchanged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._deepspeed import bf16_gradient, share_has_gradient, this_device
from .clip import clip_by_norm, squared_norm_here
from .pipe import chunks, tied_weights, ties
from .reducer import GradReducer
from .schedule import Backward, BackwardWeight, Instruction
from .sparse import empty_gradient, sparse_weights, sum_sparse

GradientOf = Callable[[nn.Parameter], Tensor | None]


def _somewhere(grads: Sequence[Tensor | None], group: Any) -> list[bool]:
    """Return for each gradient whether any rank of the group has it. Collective."""
    there = torch.tensor([g is not None for g in grads], dtype=torch.int32, device=this_device())
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=group)
    return [bool(each) for each in there.tolist()]


@contextmanager
def keep_missing_grads(module: nn.Module, replicas: Any) -> Iterator[None]:
    """Run a reduction, then remove the zeros that it filled in for gradients that no replica has."""
    weights = [p for p in module.parameters() if p.requires_grad]
    there = _somewhere([p.grad for p in weights], replicas) if weights else []
    for weight in sparse_weights(module):
        if weight.grad is None:  # DeepSpeed's dense zeros would not match the sparse gradients of other replicas
            weight.grad = empty_gradient(weight)
    yield
    for weight, somewhere in zip(weights, there, strict=True):
        if not somewhere:
            weight.grad = None


def fill_for_replicas(module: nn.Module, replicas: Any) -> None:
    """Give zeros to each weight that has no gradient here but has one on another replica. Collective over the replicas.

    ZeRO packs gradients one after another and leaves out missing ones, so that buckets of replicas would not match.
    """
    weights = [p for p in module.parameters() if p.requires_grad]
    if not weights:
        return
    for weight, somewhere in zip(weights, _somewhere([p.grad for p in weights], replicas), strict=True):
        if somewhere and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def reduce_tied_grads(module: Any, stage: int, gradient: GradientOf | None = None) -> None:
    """Sum the gradients of each tied weight over its stages. Collective over them.

    A weight with a gradient on one stage gets one on all. A weight without any (frozen, or unused in this step)
    keeps none, so no optimizer decays it. gradient: returns the gradient of a weight if that is not in `.grad`.
    Raises RuntimeError if a weight is frozen on one stage and trained on another.
    """
    sparse = set() if gradient else set(sparse_weights(module))
    for key, group, weights in ties(module):
        grads = [gradient(w) if gradient else w.grad for w in weights.values()]
        if not weights:
            continue
        for (name, weight), grad, somewhere in zip(weights.items(), grads, _somewhere(grads, group), strict=True):
            if not somewhere:
                continue
            if not weight.requires_grad:
                raise RuntimeError(
                    f"the tied weight {key}.{name} is frozen on stage {stage} but learns on another one: freeze it on all "
                    f"of its stages or on none"
                )
            if grad is None and gradient is not None:
                raise RuntimeError(
                    f"the tied weight {key}.{name} is in the optimizer of another stage but not in that of stage {stage}: give it to both"
                )
            if weight in sparse:
                sum_sparse([weight], group)
                continue
            if grad is None:
                grad = weight.grad = torch.zeros_like(weight)
            dist.all_reduce(grad, group=group)


def sum_tied_grads(module: Any, replicas: Any) -> None:
    """Sum the gradients of tied weights over replicas, one message each. Collective over them."""
    weights = list(tied_weights(module))
    for weight, somewhere in zip(
        weights, _somewhere([w.grad for w in weights], replicas) if weights else [], strict=True
    ):
        if somewhere:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad, group=replicas)


def _may_overlap(engine: Any) -> bool:
    """Return whether a GradReducer may replace DeepSpeed's reduction after the backward passes.

    This needs a run without ZeRO and without settings of DeepSpeed's reduction.
    """
    config = engine._config
    asked = config.communication_data_type not in (None, torch.float64)  # fp64 comes from `use_fp64`
    asked |= config.prescale_gradients or config.gradient_predivide_factor != 1.0 or not engine.gradient_average
    return bool(
        not engine._wrapped
        and engine.dp_world_size > 1
        and not asked
        and engine.pipeline_enable_backward_allreduce
        and not config.torch_autocast_enabled
        and config.pipeline.get("overlap_grad_reduce", True)
    )


class Reductions:
    """Mixin of the pipeline engine: its steps between the last backward pass and the optimizer step."""

    _wrapped: bool  # see `_is_wrapped`
    # One instruction per chunk: the pass that gives its weights their last gradients of a step.
    _last_backward: dict[int, Instruction]
    _overlaps: Any = None  # a GradReducer or a DistributedOptimizer that reduces gradients during backward passes
    _squared_norm: Tensor | None = None  # norm of this step over all ranks, if it came with the loss

    def _deepspeed_reduces(self: Any) -> bool:
        """Return whether DeepSpeed reduces gradients over replicas, rather than a reducer of this package."""
        return not self.distributed and not _may_overlap(self)

    def _find_last_backwards(self: Any, plan: Sequence[Instruction]) -> None:
        if self._overlaps is None and _may_overlap(self):
            self._overlaps = GradReducer(self.module, self._replicas, chunk_of=chunks(self.module))
        self._may_arm = bool(self._config.pipeline.get("overlap_grad_reduce", True))
        self._last_backward = {each.chunk: each for each in plan if isinstance(each, (Backward, BackwardWeight))}

    @contextmanager
    def _accumulating(self: Any, instruction: Instruction) -> Iterator[None]:
        """Prepare and finish gradient accumulation around a backward pass.

        DeepSpeed's bf16 optimizer accumulates in fp32.
        """
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        if self._overlaps and self._may_arm and self._last_backward[instruction.chunk] is instruction:
            self._overlaps.arm(instruction.chunk)
        yield
        if self.using_bf16_optimizer and not self.optimizer.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _squared_norm_here(self: Any) -> Tensor | None:
        """Return this rank's part, a scalar, of the squared norm for `clip_fp32_gradients`.

        None if DeepSpeed computes the norm, the gradients still have a loss scale, or there is only one stage.
        """
        if self._wrapped and not self.distributed or self.num_stages == 1 or self.torch_autocast_z0_gradscaler:
            return None
        square: Tensor = self._square_of_this_rank()
        return square

    def _square_of_this_rank(self: Any) -> Tensor:
        if self.distributed:
            square: Tensor = self.optimizer.squared_norm(self.grid.get_slice_parallel_rank(), self.device)
            dist.all_reduce(square, group=self._replicas)
            return square
        return squared_norm_here(self.module.parameters(), self.grid.get_slice_parallel_rank(), self.device)

    def _is_wrapped(self: Any) -> bool:
        """Return whether a DeepSpeed optimizer wraps the user's and clips the gradients."""
        return bool(self.fp16_enabled() or self.bfloat16_enabled() or self.zero_optimization())

    def clip_fp32_gradients(self: Any) -> None:
        """Clip the gradients to the global norm; DeepSpeed's own counts only the first stage.

        If the norm is not finite, the gradients are dropped. Then the optimizer changes neither weights nor
        moments nor step counts, on all ranks, since all have the same norm. A `torch.amp.GradScaler` does this
        itself.
        """
        root = self._take_norm()
        clip_by_norm(self.module.parameters(), root, self.gradient_clipping())
        norm = self._global_grad_norm = root.item()
        if self.torch_autocast_z0_gradscaler:
            return
        self.optimizer.overflow = not math.isfinite(norm)  # DeepSpeed counts this as a skipped step
        if self.optimizer.overflow:
            self.module.zero_grad(set_to_none=True)

    def _take_norm(self: Any) -> Tensor:
        """Return the global gradient norm, a scalar, computed here unless it came with the loss."""
        total, self._squared_norm = self._squared_norm, None
        if total is None:
            total = self._square_of_this_rank()
            dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        root: Tensor = total.sqrt()
        return root

    def _take_model_step(self: Any, lr_kwargs: Any) -> None:
        if self.distributed:
            norm = self._take_norm()
            self.optimizer.clip(norm, self.gradient_clipping())
            self.optimizer.overflow = not math.isfinite(norm.item())  # DeepSpeed counts this as a skipped step
        elif not self._wrapped and not self.gradient_clipping():
            self.clip_fp32_gradients()  # otherwise DeepSpeed or its optimizer asks for the norm
        super()._take_model_step(lr_kwargs)  # type: ignore[misc]

    def buffered_allreduce_fallback(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.dp_world_size == 1:
            return  # DeepSpeed would copy all gradients even without replicas
        reduce = super().buffered_allreduce_fallback  # type: ignore[misc]
        if self.using_bf16_optimizer:  # this optimizer keeps fp32 sums for all weights
            reduce(*args, **kwargs)
            return
        with keep_missing_grads(self.module, self._replicas):
            reduce(*args, **kwargs)

    def _reduce_gradients(self: Any) -> None:
        """Reduce gradients over replicas, then over the stages of tied weights.

        In this order all copies of a tied weight get the same bits. DeepSpeed uses the reverse order. Then the
        rounding of a sum over three or more replicas depends on the weight's place in a message, which differs
        between stages. ZeRO's optimizers keep only a part of what they reduce; there the replicas are summed
        first, and one replica contributes the whole sum.
        """
        if self._overlaps:
            self._overlaps.finish()
            self._exec_reduce_tied_grads()
            return
        if not self.zero_optimization() or self.using_bf16_optimizer:
            self._exec_reduce_grads()
            self._exec_reduce_tied_grads()
            return
        several = self.dp_world_size > 2  # for two replicas the order makes no difference
        if several:
            sum_tied_grads(self.module, self._replicas)
        self._exec_reduce_tied_grads()
        if several and dist.get_rank(self._replicas):
            for weight in tied_weights(self.module):
                if weight.grad is not None:
                    weight.grad.zero_()
        fill_for_replicas(self.module, self._replicas)
        self._exec_reduce_grads()

    def _exec_reduce_tied_grads(self: Any) -> None:
        gradient = self.optimizer.gradient_share if self.distributed else None
        gradient = partial(bf16_gradient, self.optimizer) if self.using_bf16_optimizer else gradient
        reduce_tied_grads(self.module, self.stage_id, gradient)
        if self.using_bf16_optimizer:
            for _, group, weights in ties(self.module):
                share_has_gradient(self.optimizer, list(weights.values()), group)

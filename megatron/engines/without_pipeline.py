"""The engine without a pipeline, around DeepSpeed's engine: every rank runs all layers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import tds
from tds import optimizer_state as zero_state
from tds import trace
from tds.measure import check_factor
from tds.optimizers import clip_in_step
from tds.reducer import GradReducer
from tds.sparse import grad_values

from .. import mpu
from ..config.ds_config import Resolved
from ..mpu.sequence import Pending, start_all_reduce
from ..mpu.vocab_shards import reduce_in_place
from ..ranks.objects import gather_objects
from ..timers import Timers
from ..training.task import Task, describe
from .engine import Batches, StepResult, end_step, set_lr
from .watch import StepWatch


class NoPipeEngine:
    """Engine without a pipeline, with the methods of PipeEngine: every rank runs all layers.

    All micro-batches of a step are read before the first forward pass, because their targets must be counted.
    watch: watchdog that ends all ranks if one rank fails or stalls in a step; None for no watchdog.
    """

    watch: StepWatch | None = None

    def __init__(
        self,
        engine: Any,
        resolved: Resolved,
        gas: int,
        task: Task,
        batch_fn: Callable[[dict[str, Tensor] | None], Any],
        timers: Timers,
    ) -> None:
        self.deepspeed = engine
        self.gas = gas
        self.timers = timers
        self.loss = task.checked_loss
        self.count_targets = task.count_targets
        self.batch_fn = batch_fn
        self.data = mpu.get_mesh().data
        # Without ZeRO, this class clips gradients itself. DeepSpeed does not report the gradient norm by which it
        # clips. With several model-parallel ranks, this norm also differs from the norm of mpu.clip_grad_norm.
        self.clips_all_gradients = resolved.zero_stage == 0
        # What reduces gradients over the replicas: a DistributedOptimizer, else a GradReducer, else (None) DeepSpeed.
        self.reducer: GradReducer | tds.DistributedOptimizer | None = engine.distributed
        if resolved.overlap_grad_reduce:
            zero_state.disable_reduction(engine)
            if self.data.size > 1:  # one replica has nothing to reduce
                self.reducer = GradReducer(engine.module, self.data.group)
        sums_gradients = resolved.overlap_grad_reduce or resolved.distributed_optimizer
        self._replica_divisor = 1 if sums_gradients else self.data.size
        # Measure whether `factor` is right for this version of DeepSpeed; raises ValueError if not.
        check_factor(engine, self.factor, own_reduction=sums_gradients)
        self.clip_grad = resolved.clip_grad
        self._loss_names: dict[str, tuple[str, ...]] = {}  # "training" or "evaluation" -> names of additional losses

    def factor(self, gas: int) -> int:
        """Return the factor on losses that undoes DeepSpeed's divisions in a step of `gas` micro-batches.

        DeepSpeed divides the loss by the number of accumulation steps, and averages gradients over replicas.
        GradReducer and DistributedOptimizer sum gradients over replicas instead.
        """
        return gas * self._replica_divisor

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        """Run one optimizer step with learning rate `lr` over `gas` micro-batches, by default --gas."""
        gas = gas or self.gas
        with self._watch_step("training"), trace.span("train_batch", "step"):
            engine = self.deepspeed
            engine.set_micro_batches(gas)
            set_lr(engine, lr)
            engine.train()
            micro_batches, counts = self._read_batches(batches, gas)
            self._pass_mean_targets(counts, gas)

            # Sums over the micro-batches of this replica.
            loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
            aux: defaultdict[str, Any] = defaultdict(float)
            for batch in micro_batches[:-1]:
                loss = self._forward(batch, loss_sum, aux)
                # `loss` is a sum over targets. This scale makes the gradients those of the mean over the global batch.
                self._backward(loss, self.factor(gas) / _num_targets(counts), last=False)
            loss = self._forward(micro_batches[-1], loss_sum, aux)

            # The losses are complete, so their sum over the replicas travels during the last backward pass.
            names = self._require_same_names(aux, "training")
            aux_sums = [aux[name] for name in names]
            pending_sums = start_all_reduce(torch.stack([loss_sum, *aux_sums]), self.data)
            num_targets = _num_targets(counts)
            self._backward(loss, self.factor(gas) / num_targets, last=True)
            mean_loss, *aux_means = (pending_sums.wait() / num_targets).unbind()

            with self.timers("optimizer"):
                norm = self._clip(engine, mean_loss)
                engine.step()
            if norm is None:  # DeepSpeed has clipped in `step`, which also measured the norm
                norm = engine.get_global_grad_norm()
            return end_step(engine, mean_loss, norm, dict(zip(names, aux_means, strict=True)))

    def _pass_mean_targets(self, counts: Pending, gas: int) -> None:
        """Give the loss function the mean number of targets of a micro-batch, if it asks for it."""
        loss_fn: Any = getattr(self.deepspeed.module, "loss_fn", None)
        if not hasattr(loss_fn, "mean_targets"):
            return

        def compute_mean() -> Tensor:
            return _nonzero_counts(counts) / (gas * self.data.size)  # micro-batches of all replicas

        # A loss that accepts a function calls it itself, so that only its forward pass waits for the counts.
        if getattr(loss_fn, "accepts_callable", False):
            loss_fn.mean_targets = compute_mean
        else:
            loss_fn.mean_targets = compute_mean()

    def _forward(self, batch: Any, loss_sum: Tensor, aux: defaultdict[str, Any]) -> Tensor:
        """Return a micro-batch's loss, a scalar. Add it to `loss_sum`, and the model's additional losses to `aux`."""
        engine = self.deepspeed
        with self.timers("forward"):
            loss = self._loss(engine, batch)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters, or was detached from them: check `loss` and "
                "the model for detach(), item() and no_grad()"
            )
        loss_sum += loss.detach().double()
        self._add_aux(aux)
        return loss

    def _backward(self, loss: Tensor, scale: Tensor, last: bool) -> None:
        """Run the backward pass of loss x scale, both scalars; reduce the gradients in the step's last micro-batch."""
        engine = self.deepspeed
        reducer = self.reducer if last else None
        with self.timers("backward"):
            if reducer:
                reducer.arm()  # the backward pass starts to reduce each gradient as soon as it is complete
            wide_loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # 16 bits would round the scale
            engine.backward(wide_loss * scale.to(wide_loss.dtype))
            if reducer:
                reducer.finish()  # reduce what is left, and wait
        if not last:
            with self.timers("optimizer"):
                engine.step()  # only counts the micro-batch

    def _clip(self, engine: Any, loss: Tensor) -> Tensor | None:
        """Clip the gradients and return their norm before it, or infinity if the spike guard rejects the step.

        Return None if DeepSpeed clips them in its own `step`. loss: loss over the global batch, a scalar.
        """
        guard = engine.spike_guard
        if guard:
            guard.begin(loss)
        if self.clips_all_gradients:  # without ZeRO: each rank holds all gradients of its weights
            norm = mpu.grad_norm(engine.module.parameters())
        elif engine.distributed:  # tds' DistributedOptimizer: each rank holds a share of the gradients
            mesh = mpu.get_mesh()
            squared_norm = engine.distributed.squared_norm(mesh.model.rank, engine.device)
            reduce_in_place(squared_norm, mesh.replica)
            norm = self._sum_over_replicas(squared_norm).sqrt()
        else:  # the other optimizers of ZeRO belong to DeepSpeed; they ask the guard themselves
            return None
        if guard:
            norm = guard.inf_if_spike(norm)  # an infinite norm makes the optimizer skip the step
        if self.clips_all_gradients:
            gradients = [grad_values(p) for p in engine.module.parameters() if p.grad is not None]
            clip_in_step(engine.optimizer, gradients, norm, self.clip_grad)
        else:
            engine.distributed.clip(norm, self.clip_grad)
        return norm

    def _watch_step(self, part: str) -> AbstractContextManager[None]:
        """Return the context of a step of `part`, `training` or `evaluation`, in which the watchdog watches."""
        return self.watch.step(part) if self.watch else nullcontext()

    def _loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss of a micro-batch, a scalar, and inform the watchdog that it begins."""
        if self.watch:
            self.watch.micro_batch()
        return self.loss(model, batch)

    @torch.no_grad()
    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        """Evaluate a global batch; return the sum `loss`, the number `targets`, and the sums of additional losses."""
        with self._watch_step("evaluation"):
            engine = self.deepspeed
            engine.eval()
            micro_batches, counts = self._read_batches(batches, self.gas)
            self._pass_mean_targets(counts, self.gas)  # a loss function may need the number before its first call
            # `loss` and `aux` become this replica's sums over all micro-batches.
            loss = torch.zeros((), dtype=torch.float64, device=engine.device)
            aux: defaultdict[str, Any] = defaultdict(float)
            for batch in micro_batches:
                loss += self._loss(engine.module, batch).double()
                self._add_aux(aux)
            # The first of the counts is the number of targets.
            results = {"targets": counts.wait().view(-1)[0].item(), "loss": self._sum_over_replicas(loss).item()}
            for name in self._require_same_names(aux, "evaluation"):
                results[name] = self._sum_over_replicas(aux[name]).item()
            return results

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        """Run the model and its loss on micro-batches (inputs, (labels, loss mask)), without training.

        Nothing is returned: the model's `loss_fn` records what the caller needs, see `RankScorer`.
        """
        with self._watch_step("evaluation"):
            model = self.deepspeed.module.eval()  # `train_batch` sets the model to training again
            for inputs, (labels, loss_mask) in micro_batches:
                if self.watch:
                    self.watch.micro_batch()
                model(*inputs, labels=labels, loss_mask=loss_mask)

    def _require_same_names(self, aux: Mapping[str, Any], part: str) -> tuple[str, ...]:
        """Return the names of the additional losses, in the same order on all ranks, for their all-reduce.

        Raises ValueError if the names differ from those of an earlier step or of another replica.
        part: `training` or `evaluation`.
        """
        names = tuple(sorted(aux))
        if self.data.size == 1:  # no all-reduce, so the names may change
            return names
        # In the first step of a part, the replicas exchange their names. Later steps must have the same names, so they
        # need no exchange.
        if part not in self._loss_names:
            all_names: set[str] = set().union(*gather_objects(names, self.data))
            self._loss_names[part] = tuple(sorted(all_names))
        if names != self._loss_names[part]:
            raise ValueError(
                f"get_additional_losses() returns {', '.join(names) or 'nothing'} in this step of {part}, but "
                f"{', '.join(self._loss_names[part]) or 'nothing'} "
                f"in another step or on another replica: return the same names in every step on every replica"
            )
        return names

    def _add_aux(self, aux: defaultdict[str, Any]) -> None:
        """Add the additional losses of the last micro-batch to `aux`, by name."""
        # For a model without this method, `dict()` is called instead, which returns no losses. The method may return
        # None.
        losses: Mapping[str, Any] = getattr(self.deepspeed.module, "get_additional_losses", dict)() or {}
        for name, value in losses.items():
            aux[name] += torch.as_tensor(value, dtype=torch.float64, device=self.deepspeed.device).detach()

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return the seconds of data reading and forward passes.

        Backward passes are omitted, because they may wait for other ranks.
        """
        return timed.get("data", 0.0) + timed.get("forward", 0.0)

    def watch_steps(self, seconds: float) -> None:
        self.watch = StepWatch(seconds, self.deepspeed.device)

    def times(self) -> dict[str, float]:
        return {}

    def _read_batches(self, batches: Batches | None, gas: int) -> tuple[list[Any], Pending]:
        """Return (`gas` micro-batches, number of targets of the global batch).

        If `count_targets` returns a vector, the number is the first element of a vector of counts. The number stays on
        the device, so that the host does not wait for the device. Its sum over the replicas travels during the first
        forward pass.
        """
        with self.timers("data"):
            # A rank without `batches` reads no data: `batch_fn` receives its micro-batches from another rank.
            batches_read: list[Any] = [None] * gas
            if batches is not None:
                batches_read = [next(batches) for _ in range(gas)]
        with self.timers("targets"):
            micro_batches = list(map(self.batch_fn, batches_read))
            if self.count_targets is None:  # each micro-batch counts as one target
                count = torch.tensor(float(gas * self.data.size), dtype=torch.float64)
                return micro_batches, Pending(None, count)
            target_count = torch.zeros((), dtype=torch.float64, device=self.deepspeed.device)
            for batch in micro_batches:
                batch_count = _check_counts(self.count_targets(batch))
                target_count = target_count + batch_count
            return micro_batches, start_all_reduce(target_count, self.data)

    def _sum_over_replicas(self, x: Tensor) -> Tensor:
        """Sum x [...] over the data-parallel ranks, in place, and return it."""
        return start_all_reduce(x, self.data).wait()


def _nonzero_counts(counts: Pending) -> Tensor:
    """Return the counts, a scalar or a vector, of which the first is the number of targets.

    A batch without targets counts as 1 target.
    """
    totals = counts.wait().clone()
    num_targets = totals.view(-1)[:1]
    num_targets += num_targets == 0
    return totals


def _num_targets(counts: Pending) -> Tensor:
    """Return the number of targets of the global batch, a scalar; it is the first count of a vector of counts."""
    return _nonzero_counts(counts).view(-1)[0]


def _check_counts(counts: Any) -> Any:
    """Return what `count_targets` returned, if it is a number, a scalar or a vector. Raises ValueError otherwise."""
    if isinstance(counts, (int, float)) or (isinstance(counts, Tensor) and counts.dim() < 2):
        return counts
    raise ValueError(f"count_targets returns {describe(counts)}: return one number, or a tensor of one number")

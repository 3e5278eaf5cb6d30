"""The engine without a pipeline, around DeepSpeed's engine: every rank runs all layers."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tds
from tds import optimizer_state as zero_state
from tds import trace
from tds.measure import check_factor
from tds.optimizers import clip_in_step
from tds.reducer import GradReducer
from tds.sparse import numbers_of

from .. import mpu
from ..config.ds_config import Resolved
from ..mpu import Axis
from ..ranks.objects import gather_objects
from ..timers import Timers
from ..training.task import Task, what
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
        self.own_clip = resolved.clip_grad if resolved.zero_stage == 0 else None
        self.reducer: GradReducer | tds.DistributedOptimizer | None = engine.distributed
        if resolved.overlap_grad_reduce:
            zero_state.take_over_reduction(engine)
            if self.data.size > 1:
                self.reducer = GradReducer(engine.module, self.data.group)
        sums = resolved.overlap_grad_reduce or resolved.distributed_optimizer
        self._averaged = 1 if sums else self.data.size
        check_factor(engine, self.factor, own_reduction=sums)
        self.clip_grad = resolved.clip_grad
        self._names: dict[str, tuple[str, ...]] = {}  # "training" or "evaluation" -> names of additional losses

    def factor(self, gas: int) -> int:
        """Return the factor on losses that undoes DeepSpeed's divisions in a step of `gas` micro-batches.

        DeepSpeed divides the loss by the number of accumulation steps, and averages gradients over replicas.
        GradReducer and DistributedOptimizer sum gradients over replicas instead.
        """
        return gas * self._averaged

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        with self._watched("training"), trace.span("train_batch", "step"):
            return self._train_batch(batches, lr, gas or self.gas)

    def _train_batch(self, batches: Batches | None, lr: float, gas: int) -> StepResult:
        ds = self.deepspeed
        ds.set_micro_batches(gas)
        set_lr(ds, lr)
        ds.train()
        made, counts = self._read(batches, gas)
        self._share_mean(counts, gas)
        total = torch.zeros((), dtype=torch.float64, device=ds.device)
        aux: defaultdict[str, Any] = defaultdict(float)
        for batch in made[:-1]:
            loss = self._forward(batch, total, aux)
            self._backward(loss, self.factor(gas) / _at_least_one(counts).view(-1)[0], last=False)
        loss = self._forward(made[-1], total, aux)
        # The losses are complete, so their sum over the replicas travels during the last backward pass.
        names = self._agreed(aux, "training")
        sums = Sum(torch.stack([total, *(aux[name] for name in names)]), self.data)
        targets = _at_least_one(counts).view(-1)[0]
        self._backward(loss, self.factor(gas) / targets, last=True)
        loss, *others = (sums.wait() / targets).unbind()
        with self.timers("optimizer"):
            norm = self._clip(ds, loss)
            ds.step()
        if norm is None:
            norm = ds.get_global_grad_norm()
        return end_step(ds, loss, norm, dict(zip(names, others, strict=True)))

    def _share_mean(self, counts: "Sum", gas: int) -> None:
        """Give the loss function the mean number of targets of a micro-batch, if it asks for it."""
        loss_fn: Any = getattr(self.deepspeed.module, "loss_fn", None)

        def mean() -> Tensor:
            return _at_least_one(counts) / (gas * self.data.size)

        if hasattr(loss_fn, "mean_targets"):
            loss_fn.mean_targets = mean if getattr(loss_fn, "may_wait", False) else mean()

    def _forward(self, batch: Any, total: Tensor, aux: defaultdict[str, Any]) -> Tensor:
        """Return the loss of a micro-batch, a scalar. Add it to `total`, and the model's additional losses to `aux`."""
        ds = self.deepspeed
        with self.timers("forward"):
            loss = self._loss(ds, batch)
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on the model's parameters, or was detached from them: check `loss` and "
                "the model for detach(), item() and no_grad()"
            )
        total += loss.detach().double()
        for name, value in self._aux().items():
            aux[name] += torch.as_tensor(value, dtype=torch.float64, device=ds.device).detach()
        return loss

    def _backward(self, loss: Tensor, scale: Tensor, last: bool) -> None:
        """Run the backward pass of loss x scale, both scalars; reduce the gradients in the step's last micro-batch."""
        ds = self.deepspeed
        reducer = self.reducer if last else None
        with self.timers("backward"):
            if reducer:
                reducer.arm()
            ds.backward(loss * scale.to(loss.dtype))
            if reducer:
                reducer.finish()
        if not last:
            with self.timers("optimizer"):
                ds.step()  # only counts the micro-batch

    def _clip(self, ds: Any, loss: Tensor) -> Tensor | None:
        """Clip the gradients and return their norm before it, or infinity if the spike guard rejects the step.

        Return None if DeepSpeed clips them in its own `step`. loss: loss over the global batch, a scalar.
        """
        guard = ds.spike_guard
        if guard:
            guard.begin(loss)
        if self.own_clip is not None:
            norm = mpu.grad_norm(ds.module.parameters())
        elif ds.distributed:
            norm = self._norm_of_shares(ds)
        else:
            return None
        if guard:
            norm = guard.checked(norm)
        if self.own_clip is None:
            ds.distributed.clip(norm, self.clip_grad)
        else:
            gradients = [numbers_of(p) for p in ds.module.parameters() if p.grad is not None]
            clip_in_step(ds.optimizer, gradients, norm, self.own_clip)
        return norm

    def _watched(self, part: str) -> AbstractContextManager[None]:
        return self.watch.step(part) if self.watch else nullcontext()

    def _loss(self, model: Any, batch: Any) -> Tensor:
        if self.watch:
            self.watch.micro_batch()
        return self.loss(model, batch)

    @torch.no_grad()
    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        with self._watched("evaluation"):
            return self._eval_batch(batches)

    def _eval_batch(self, batches: Batches | None) -> dict[str, float]:
        ds = self.deepspeed
        ds.eval()
        made, counts = self._read(batches, self.gas)
        self._share_mean(counts, self.gas)
        loss = torch.zeros((), dtype=torch.float64, device=ds.device)
        aux: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros_like(loss))
        for batch in made:
            loss += self._loss(ds.module, batch).double()
            for name, value in self._aux().items():
                aux[name] += value
        found = {"targets": _at_least_one(counts).view(-1)[0].item(), "loss": self._sum(loss).item()}
        for name in self._agreed(aux, "evaluation"):
            found[name] = self._sum(aux[name]).item()
        return found

    @torch.no_grad()
    def forward(self, made: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        with self._watched("evaluation"):
            model = self.deepspeed.module.eval()
            for inputs, (labels, loss_mask) in made:
                if self.watch:
                    self.watch.micro_batch()
                model(*inputs, labels=labels, loss_mask=loss_mask)

    def _agreed(self, aux: Mapping[str, Any], when: str) -> tuple[str, ...]:
        """Return the names of the additional losses, in the same order on all ranks, for their all-reduce.

        Raises ValueError if the names differ from those of an earlier step or of another replica.
        when: `training` or `evaluation`.
        """
        names = tuple(sorted(aux))
        if self.data.size == 1:
            return names
        if when not in self._names:
            every: set[str] = set().union(*gather_objects(names, self.data))
            self._names[when] = tuple(sorted(every))
        if names != self._names[when]:
            raise ValueError(
                f"get_additional_losses() returns {', '.join(names) or 'nothing'} in this step of {when}, but "
                f"{', '.join(self._names[when]) or 'nothing'} "
                f"in another step or on another replica: return the same names in every step on every replica"
            )
        return names

    def _aux(self) -> dict[str, Tensor]:
        """Return name -> additional loss of the last micro-batch."""
        return getattr(self.deepspeed.module, "get_additional_losses", dict)() or {}

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return the seconds of data reading and forward passes.

        Backward passes are omitted, because they may wait for other ranks.
        """
        return timed.get("data", 0.0) + timed.get("forward", 0.0)

    def watch_steps(self, seconds: float) -> None:
        self.watch = StepWatch(seconds, self.deepspeed.device)

    def times(self) -> dict[str, float]:
        return {}

    def _read(self, batches: Batches | None, gas: int) -> tuple[list[Any], "Sum"]:
        """Return (`gas` micro-batches, number of targets of the global batch).

        If `count_targets` returns a vector, the number is the first element of a vector of counts. The number stays on
        the device, so that the host does not wait for the device. Its sum over the replicas travels during the first
        forward pass.
        """
        with self.timers("data"):
            read: list[Any] = [None] * gas
            if batches is not None:
                read = [next(batches) for _ in range(gas)]
        with self.timers("targets"):
            made = [self.batch_fn(data) for data in read]
            if self.count_targets is None:
                return made, Sum(torch.tensor(float(gas * self.data.size), dtype=torch.float64), None)
            total = torch.zeros((), dtype=torch.float64, device=self.deepspeed.device)
            for batch in made:
                total = total + _counts(self.count_targets(batch))
            return made, Sum(total, self.data)

    def _norm_of_shares(self, ds: Any) -> Tensor:
        mesh = mpu.get_mesh()
        total: Tensor = ds.distributed.squared_norm(mesh.model.rank, ds.device)
        if mesh.replica.size > 1:
            dist.all_reduce(total, group=mesh.replica.group)
        return self._sum(total).sqrt()

    def _sum(self, x: Tensor) -> Tensor:
        return Sum(x, self.data).wait()


class Sum:
    """A sum over the ranks of an axis, which travels while these ranks compute. axis: None for a tensor to keep."""

    def __init__(self, x: Tensor, axis: Axis | None) -> None:
        self._x = x
        self._work: Any = None
        if axis is not None and axis.size > 1:
            self._work = dist.all_reduce(x, group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum. On an accelerator, its stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._x


def _at_least_one(counts: Sum) -> Tensor:
    """Return the number of targets; a batch without targets counts as 1 target."""
    return counts.wait().clamp(min=1.0)


def _counts(found: Any) -> Any:
    """Return what `count_targets` returned, if it is a number, a scalar or a vector. Raises ValueError otherwise."""
    if isinstance(found, Tensor) and found.dim() < 2 or isinstance(found, (int, float)):
        return found
    raise ValueError(f"count_targets returns {what(found)}: return one number, or a tensor of one number")

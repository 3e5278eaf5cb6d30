"""Engines with a common interface, by which the training loop uses DeepSpeed with a pipeline or without one.

The loss is the sum over all targets of a global batch, divided by the number of these targets. The targets are counted
before the first backward pass, so the gradients of all micro-batches have the right scale.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import tds
from tds import optimizer_state as zero_state
from tds import trace
from tds.clip import clip_in_step
from tds.measure import check_factor
from tds.reducer import GradReducer
from tds.sparse import numbers_of
from tds.spikes import Deviation

from .. import mpu
from ..config.ds_config import Resolved
from ..model.router import update_routers
from ..ranks.objects import gather_objects
from .metrics import Timers
from .task import Task, what
from .watch import StepWatch

Batches = Iterator[dict[str, Tensor]]


class Step(NamedTuple):
    """Result of one optimizer step.

    loss: mean loss over the global batch. grad_norm: gradient norm before clipping. Both may be tensors that the device
    is still computing, so reading them may wait. If grad_norm is not finite, or there is a spike, the step was skipped:
    weights, moments and the optimizer's step count are unchanged on all ranks.
    skipped: True if the host already knows that the step was skipped; False does not prove the opposite.
    aux: name -> additional loss of the model, averaged over targets.
    spike: what was wrong with the step if --skip-step-sigma skipped it, else None.
    """

    loss: Tensor
    grad_norm: Tensor | float
    loss_scale: float | None
    skipped: bool
    aux: Mapping[str, Tensor] = {}
    spike: Deviation | None = None


class Engine(Protocol):
    """Protocol of the engines that the training loop can use."""

    deepspeed: Any

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> Step:
        """Run one optimizer step with learning rate `lr`.

        batches: iterator over micro-batches, or None on a rank that reads no data.
        gas: number of micro-batches of the step on each replica; --gas if None.
        """
        ...

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        """Evaluate a global batch; return the sum `loss`, the number `targets`, and the sums of additional losses.

        The batch has --gas micro-batches on each replica, even if training steps have other numbers of them.
        """
        ...

    def forward(self, made: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        """Run the model and its loss on micro-batches (inputs, (labels, loss mask)), without training.

        All ranks call this with equal numbers of micro-batches; each replica has its own.
        """
        ...

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return how many seconds this rank worked since the last call of `busy`, without waiting for other ranks.

        The sum omits times that are not measured or that may include waiting. timed: the result of `Timers.take`.
        """
        ...

    def times(self) -> dict[str, float]:
        """Return name -> seconds since the last call of `times`, for parts of a step that `Timers` does not measure."""
        ...


def _counts(found: Any) -> Any:
    """Return what `count_targets` returned, if it is a number, a scalar or a vector. Raises ValueError otherwise."""
    if isinstance(found, Tensor) and found.dim() < 2 or isinstance(found, (int, float)):
        return found
    raise ValueError(f"count_targets returns {what(found)}: return one number, or a tensor of one number")


def _set_lr(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def _end_step(engine: Any, loss: Tensor, norm: Any, aux: Mapping[str, Tensor]) -> Step:
    """Update the routers of experts, and return the result of the step."""
    spike = engine.spike_guard.found if engine.spike_guard else None
    skipped = spike is not None or zero_state.was_skipped(engine)
    if spike:
        norm = engine.spike_guard.norm
    elif skipped:
        norm = math.inf
    elif norm is None:
        norm = 0.0
    if isinstance(norm, Tensor):  # DeepSpeed's ZeRO 3 returns a norm on the CPU if the optimizer is offloaded.
        norm = norm.to(loss.device)
    finite = norm.isfinite() if isinstance(norm, Tensor) else math.isfinite(norm)
    update_routers(engine.module, not skipped and finite)
    return Step(loss.detach(), norm, zero_state.loss_scale(engine), skipped, aux, spike)


class PipeEngine:
    """Engine with a pipeline of one or more stages.

    breakdown: True measures the time of each kind of pipeline instruction; each measurement synchronizes with the
    device.
    """

    def __init__(self, engine: Any, timers: Timers, breakdown: bool) -> None:
        self.deepspeed = engine
        self.timers = timers
        self.gas: int = engine.micro_batches
        engine.progress.breakdown = breakdown

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> Step:
        ds = self.deepspeed
        ds.set_micro_batches(gas or self.gas)
        _set_lr(ds, lr)
        with self.timers("train batch"):
            ds.train_batch(batches)
        ds.set_dataiterator(None)  # DeepSpeed's reference to the data iterator would keep the data workers alive
        aux = {name: total / ds.num_targets for name, total in self._aux(ds.micro_batches).items()}
        return _end_step(ds, self._exact_loss(), ds.get_global_grad_norm(), aux)

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        ds = self.deepspeed
        ds.eval_batch(batches, num_micro_batches=self.gas)
        aux = {name: total.item() for name, total in self._aux(self.gas).items()}
        return {"loss": self._exact_loss().item() * ds.num_targets, "targets": ds.num_targets, **aux}

    def forward(self, made: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        ds = self.deepspeed
        batch_fn = ds.batch_fn
        ds.set_batch_fn(None)
        try:
            ds.eval_batch(iter(made), num_micro_batches=len(made))
        finally:
            ds.set_batch_fn(batch_fn)

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return how many seconds this stage worked since the last call of `busy`; always 0 on accelerators."""
        progress = self.deepspeed.progress
        seconds = progress.busy
        progress.busy = 0.0
        return float(seconds)

    def times(self) -> dict[str, float]:
        return dict(self.deepspeed.progress.take())

    def _aux(self, gas: int) -> dict[str, Tensor]:
        """Return name -> sum of an additional loss over the last global batch, of `gas` micro-batches a replica."""
        micros = gas * self.deepspeed.dp_world_size
        return {name: mean * micros for name, mean in self.deepspeed.additional_losses.items()}

    def _exact_loss(self) -> Tensor:
        """Return the loss of the last global batch in fp64, the dtype in which the engine accumulates it."""
        return torch.stack(list(self.deepspeed.named_losses.values())).sum()


class NoPipeEngine:
    """Engine without a pipeline: every rank runs all layers.

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

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> Step:
        with self._watched("training"), trace.span("train_batch", "step"):
            return self._train_batch(batches, lr, gas or self.gas)

    def _train_batch(self, batches: Batches | None, lr: float, gas: int) -> Step:
        ds = self.deepspeed
        ds.set_micro_batches(gas)
        _set_lr(ds, lr)
        ds.train()
        made, counts = self._read(batches, gas)
        loss_fn: Any = getattr(ds.module, "loss_fn", None)
        if hasattr(loss_fn, "mean_targets"):
            loss_fn.mean_targets = counts / (gas * self.data.size)
        targets = counts.view(-1)[0]
        total = torch.zeros((), dtype=torch.float64, device=ds.device)
        aux: defaultdict[str, Any] = defaultdict(float)
        for micro, batch in enumerate(made):
            last = micro == gas - 1
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
            with self.timers("backward"):
                if self.reducer and last:
                    self.reducer.arm()
                ds.backward(loss * (self.factor(gas) / targets).to(loss.dtype))
                if self.reducer and last:
                    self.reducer.finish()
            if not last:
                with self.timers("optimizer"):
                    ds.step()  # only counts the micro-batch
        names = self._agreed(aux, "training")
        loss, *others = (self._sum(torch.stack([total, *(aux[name] for name in names)])) / targets).unbind()
        with self.timers("optimizer"):
            norm = self._clip(ds, loss)
            ds.step()
        known = ds.get_global_grad_norm() if norm is None else norm
        return _end_step(ds, loss, known, dict(zip(names, others, strict=True)))

    def _clip(self, ds: Any, loss: Tensor) -> Tensor | None:
        """Clip the gradients and return their norm before it, or infinity if the spike guard rejects the step.

        Return None if DeepSpeed clips them in its own `step`. loss: loss over the global batch, a scalar.
        """
        guard = ds.spike_guard
        if guard:
            guard.begin(loss)
        if self.own_clip is not None:
            norm = mpu.grad_norm(ds.module.parameters())
            norm = guard.checked(norm) if guard else norm
            gradients = [numbers_of(p) for p in ds.module.parameters() if p.grad is not None]
            clip_in_step(ds.optimizer, gradients, norm, self.own_clip)
            return norm
        if not ds.distributed:
            return None
        norm = self._norm_of_shares(ds)
        norm = guard.checked(norm) if guard else norm
        ds.distributed.clip(norm, self.clip_grad)
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
        made, targets = self._read(batches, self.gas)
        loss = torch.zeros((), dtype=torch.float64, device=ds.device)
        aux: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros_like(loss))
        for batch in made:
            loss += self._loss(ds.module, batch).double()
            for name, value in self._aux().items():
                aux[name] += value
        sums = {"loss": loss, **{name: aux[name] for name in self._agreed(aux, "evaluation")}}
        return {"targets": targets.item()} | {name: self._sum(value).item() for name, value in sums.items()}

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
            every = gather_objects(names, self.data)
            self._names[when] = tuple(sorted({name for each in every for name in each}))
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

    def times(self) -> dict[str, float]:
        return {}

    def _read(self, batches: Batches | None, gas: int) -> tuple[list[Any], Tensor]:
        """Return (`gas` micro-batches, number of targets of the global batch).

        If `count_targets` returns a vector, the number is the first element of a vector of counts. A batch without
        targets counts as 1 target. The number stays on the device, so that the host does not wait for the device.
        """
        with self.timers("data"):
            read = [next(batches) if batches is not None else None for _ in range(gas)]
        with self.timers("targets"):
            made = [self.batch_fn(data) for data in read]
            if self.count_targets is None:
                return made, torch.tensor(float(gas * self.data.size), dtype=torch.float64)
            total = torch.zeros((), dtype=torch.float64, device=self.deepspeed.device)
            for batch in made:
                total = total + _counts(self.count_targets(batch))
            return made, self._sum(total).clamp(min=1.0)

    def _norm_of_shares(self, ds: Any) -> Tensor:
        mesh = mpu.get_mesh()
        total: Tensor = ds.distributed.squared_norm(mesh.model.rank, ds.device)
        if mesh.replica.size > 1:
            dist.all_reduce(total, group=mesh.replica.group)
        return self._sum(total).sqrt()

    def _sum(self, x: Tensor) -> Tensor:
        if self.data.size > 1:
            dist.all_reduce(x, group=self.data.group)
        return x

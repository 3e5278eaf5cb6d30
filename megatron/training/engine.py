"""One seam between the training loop and DeepSpeed: both engines answer `train_batch` and `eval_batch`.

Losses are sums over target tokens, divided by the number of targets in the whole global batch.
That number is counted before the first backward pass, so gradients come out right at once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tds
from tds import optimizer_state as zero_state

from .. import mpu
from ..config import Config
from ..config.ds_config import Resolved
from ..model.layers import global_parameters
from ..optim import build_optimizer
from .metrics import Timers

Batches = Iterator[dict[str, Tensor]]
ForwardStep = Callable[[Batches | None, Any], tuple[Tensor, Any]]
CountTargets = Callable[[dict[str, Tensor] | None], Tensor]


class Step(NamedTuple):
    """What one optimizer step gave; loss is over the global batch, grad_norm before clipping.

    Both may be on the device still, which works on while nobody reads them. If grad_norm is not finite, the step was not
    applied: weights, moments and the optimizer's step count are as they were, on all ranks. skipped: that this is known
    already.
    """

    loss: Tensor
    grad_norm: Tensor | float
    loss_scale: float | None
    skipped: bool


class Engine(Protocol):
    """What the training loop needs of an engine."""

    deepspeed: Any

    def train_batch(self, batches: Batches | None, lr: float) -> Step: ...

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        """Of a global batch: `loss`, its sum; `targets`, their number; sums of what the model looks at apart, by name."""
        ...

    def busy(self, timed: Mapping[str, float]) -> float:
        """Seconds since this was last asked that this rank worked by itself, as far as that is known. timed: what `Timers.take` gave."""
        ...


def build_engine(
    model: nn.Module,
    config: Config,
    resolved: Resolved,
    forward_step: ForwardStep,
    count_targets: CountTargets | None,
    timers: Timers,
) -> Engine:
    """DeepSpeed's engine for a plain model, the pipeline engine for a PipelineModule."""
    for name, parameter in global_parameters(model):
        if not parameter.dim():
            raise ValueError(
                f"the parameter {name} is a single number, which DeepSpeed cannot send: give it one dimension, as torch.ones(1) has"
            )
    optimizer = build_optimizer(model, config.optim, config.model.kernels)
    pipeline = _is_pipeline(model, config)
    engine, *_ = tds.initialize(
        model=model, optimizer=optimizer, config=resolved.deepspeed, mpu=None if pipeline else mpu
    )
    if resolved.precision == "fp64":
        zero_state.use_fp64(engine)
    if mpu.get_mesh().replica.size > 1:
        zero_state.heed_copies(engine)
    if pipeline:
        return PipeEngine(engine, timers)
    return PlainEngine(engine, resolved, config.train.gas, forward_step, count_targets, timers)


def _is_pipeline(model: nn.Module, config: Config) -> bool:
    """Whether `model` is a PipelineModule, ours or DeepSpeed's. Raises ValueError if the settings say otherwise."""
    pipeline = tds.pipe.is_pipeline(model)
    wanted = config.parallel.pipe_parallel_size
    if pipeline and (wanted == 0 or model.num_stages != config.parallel.stages):
        raise ValueError(
            f"model_provider gives a PipelineModule of {model.num_stages} stages, but --pipe-parallel-size is {wanted}: "
            f"build it with topology=mpu.get_topology(), and a plain module for 0"
        )
    ranks, topology = mpu.get_mesh().model.size, cast(Any, model).topology if pipeline else None
    if topology and max(topology().get_dim("model"), 1) != ranks:
        raise ValueError(
            f"model_provider gives a PipelineModule that does not know of --model-parallel-size {ranks}: build it with "
            f"topology=mpu.get_topology(), not num_stages"
        )
    if not pipeline and wanted > 0:
        raise ValueError(
            f"--pipe-parallel-size is {wanted}, but model_provider gives a {type(model).__name__}, not a PipelineModule: "
            f"build one of a list of layers, or say --pipe-parallel-size 0"
        )
    return pipeline


def _set_lr(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr


def _result(engine: Any, loss: Tensor, norm: Any) -> Step:
    skipped = zero_state.was_skipped(engine)
    norm = math.inf if skipped else norm if norm is not None else 0.0
    return Step(loss.detach(), norm, zero_state.loss_scale(engine), skipped)


def leave_out_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Before `optimizer.step()`: let it change nothing, neither weights nor moments nor step counts, if `norm` is not finite.

    torch's fused optimizers take that from a flag on the device. Any other (SGD, apex's Adam) is asked for by the host,
    which waits for the device in every step: it gets no gradients.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    elif not norm.isfinite():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
            if not isinstance(optimizer, torch.optim.SGD):  # apex's Adam counts calls
                group["step"] = group.get("step", 0) - 1


class PipeEngine:
    """A pipeline of one or more stages."""

    def __init__(self, engine: Any, timers: Timers) -> None:
        self.deepspeed, self.timers = engine, timers

    def train_batch(self, batches: Batches | None, lr: float) -> Step:
        _set_lr(self.deepspeed, lr)
        with self.timers("train batch"):
            self.deepspeed.train_batch(batches)
        self.deepspeed.set_dataiterator(None)  # or it would keep worker processes alive
        return _result(self.deepspeed, self._exact_loss(), self.deepspeed.get_global_grad_norm())

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        ds = self.deepspeed
        ds.eval_batch(batches)
        micros = self.deepspeed.micro_batches * self.deepspeed.dp_world_size
        aside = {name: mean.item() * micros for name, mean in ds.additional_losses.items()}
        return {"loss": self._exact_loss().item() * ds.num_targets, "targets": ds.num_targets, **aside}

    def busy(self, timed: Mapping[str, float]) -> float:
        """On an accelerator 0: stages note no times there."""
        progress = self.deepspeed.progress
        seconds, progress.busy = progress.busy, 0.0
        return float(seconds)

    def _exact_loss(self) -> Tensor:
        """In fp64, as it was added up."""
        return torch.stack(list(self.deepspeed.named_losses.values())).sum()


def _what(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    return f"{len(found)} things" if isinstance(found, (tuple, list)) else type(found).__name__


class PlainEngine:
    """No pipeline: every rank runs all layers.

    With `count_targets`, `forward_step` returns `(sum of the loss, number of targets)`. Without
    it, `(mean loss, anything)`, and the loss of a step is the mean of these means.
    """

    def __init__(
        self,
        engine: Any,
        resolved: Resolved,
        gas: int,
        forward_step: ForwardStep,
        count_targets: CountTargets | None,
        timers: Timers,
    ) -> None:
        self.deepspeed, self.gas, self.timers = engine, gas, timers
        self.forward_step, self.count_targets = forward_step, count_targets
        self.data = mpu.get_mesh().data
        # DeepSpeed's plain optimizer neither reports nor, with a grid, measures the norm as we promise.
        self.own_clip = resolved.clip_grad if resolved.zero_stage == 0 else None
        self.reducer: mpu.GradReducer | None = None
        grad_buffers = zero_state.fp32_gradients(engine)
        overlap = resolved.overlap_grad_reduce and (resolved.zero_stage == 0 or grad_buffers is not None)
        if overlap:
            zero_state.take_over_reduction(engine)
            if self.data.size > 1:
                self.reducer = mpu.GradReducer(
                    grad_buffers or engine.module.parameters(), self.data, grad_buffers=grad_buffers
                )
        # DeepSpeed divides by the accumulation steps, and averages over the replicas where our reducer sums.
        self.factor = gas if overlap else gas * self.data.size

    def train_batch(self, batches: Batches | None, lr: float) -> Step:
        ds = self.deepspeed
        _set_lr(ds, lr)
        ds.train()
        with self.timers("data"):
            read = self._read(batches)
        with self.timers("targets"):
            targets = self._count(read)
        total = torch.zeros((), dtype=torch.float64, device=ds.device)
        norm = None
        for micro, batch in enumerate(read):
            last = micro == self.gas - 1
            with self.timers("forward"):
                loss = self._loss(self._feed(batches, batch), ds)
            total += loss.detach().double()
            with self.timers("backward"):
                if self.reducer and last:
                    self.reducer.arm()
                ds.backward(loss * (self.factor / targets).to(loss.dtype))
                if self.reducer and last:
                    self.reducer.finish()
            with self.timers("optimizer"):
                if last and self.own_clip is not None:
                    norm = mpu.clip_grad_norm(ds.module.parameters(), self.own_clip)
                    leave_out_unless_finite(ds.optimizer, norm)
                ds.step()
        return _result(ds, self._sum(total) / targets, ds.get_global_grad_norm() if norm is None else norm)

    @torch.no_grad()
    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        ds = self.deepspeed
        ds.eval()
        read = self._read(batches)
        targets = self._count(read)
        sums: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=ds.device))
        for batch in read:
            sums["loss"] += self._loss(self._feed(batches, batch), ds.module).double()
            for name, value in (getattr(ds.module, "get_additional_losses", dict)() or {}).items():
                sums[name] += value
        return {"targets": targets.item()} | {name: self._sum(value).item() for name, value in sums.items()}

    def busy(self, timed: Mapping[str, float]) -> float:
        """Reading and forward passes; behind these begins the waiting for replicas."""
        return timed.get("data", 0.0) + timed.get("forward", 0.0)

    def _loss(self, batches: Batches | None, model: Any) -> Tensor:
        """Of one micro-batch, by the user's function. Raises TypeError if that is no loss."""
        found: Any = self.forward_step(batches, model)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise TypeError(f"forward_step returns {_what(found)}: return (loss, anything), as `return loss, {{}}`")
        loss = found[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise TypeError(f"forward_step returns {_what(loss)} as the loss: return a tensor of one number")
        return loss

    def _read(self, batches: Batches | None) -> list[dict[str, Tensor] | None]:
        return [next(batches) if batches is not None else None for _ in range(self.gas)]

    @staticmethod
    def _feed(batches: Batches | None, batch: dict[str, Tensor] | None) -> Batches | None:
        return iter([batch]) if batches is not None and batch is not None else None

    def _count(self, read: list[dict[str, Tensor] | None]) -> Tensor:
        """Targets of the global batch, at least 1; never read back from the device."""
        if self.count_targets is None:
            return torch.tensor(float(self.gas * self.data.size), dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64, device=self.deepspeed.device)
        for batch in read:
            total += self.count_targets(batch)
        return self._sum(total).clamp(min=1.0)

    def _sum(self, x: Tensor) -> Tensor:
        if self.data.size > 1:
            dist.all_reduce(x, group=self.data.group)
        return x

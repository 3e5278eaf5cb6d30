"""What the training loop calls for a step: the engine with a pipeline; the one without has the same methods.

The loss is the sum over all targets of a global batch, divided by the number of these targets. The targets are counted
before the first backward pass, so the gradients of all micro-batches have the right scale.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tds import optimizer_state as zero_state
from tds.spikes import Deviation

from ..timers import Timers

if TYPE_CHECKING:
    from .without_pipeline import NoPipeEngine

Engine: TypeAlias = "PipeEngine | NoPipeEngine"
Batches = Iterator[dict[str, Tensor]]


class StepResult(NamedTuple):
    """Result of one optimizer step.

    loss: mean loss over the global batch. grad_norm: gradient norm before clipping. Both may be tensors that the device
    is still computing, so reading them may wait. If grad_norm is not finite, or there is a spike, the step was skipped:
    weights, moments and the optimizer's step count are unchanged on all ranks.
    skip_is_known: True if the host already knows that the step was skipped; False does not prove the opposite.
    aux: name -> additional loss of the model, averaged over targets.
    spike: what was wrong with the step if --skip-step-sigma skipped it, else None.
    """

    loss: Tensor
    grad_norm: Tensor | float
    loss_scale: float | None
    skip_is_known: bool
    aux: Mapping[str, Tensor] = {}
    spike: Deviation | None = None

    @property
    def skipped(self) -> bool:
        """True if the step was skipped. Reading it may wait for the device."""
        return self.skip_is_known or not math.isfinite(float(self.grad_norm))


def set_lr(engine: Any, lr: float) -> None:
    """Set the learning rate of each parameter group of a DeepSpeed engine."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def end_step(engine: Any, loss: Tensor, norm: Any, aux: Mapping[str, Tensor]) -> StepResult:
    """Update the routers of experts and the average of the weights, and return the result of the step.

    norm: gradient norm before clipping, as the engine reports it: a tensor, a float, or None if it was not measured.
    """
    guard = engine.spike_guard
    spike = guard.spike if guard else None
    skip_is_known = spike is not None or zero_state.was_skipped(engine)
    if spike:
        norm = guard.norm  # the measured norm: for the optimizer, the guard replaced it by infinity
    elif skip_is_known:  # a gradient is not finite
        norm = math.inf
    elif norm is None:  # not measured, but the step was not skipped, so it counts as finite
        norm = 0.0
    if isinstance(norm, Tensor):
        norm = norm.to(loss.device)  # with an offloaded optimizer, DeepSpeed's ZeRO 3 returns it on the CPU
        is_finite = norm.isfinite()
    else:
        is_finite = math.isfinite(norm)
    applied = not skip_is_known and is_finite  # whether weights changed; a tensor need not be read by the host
    # Only routers that balance the experts by biases have this buffer.
    if any(hasattr(module, "bias_steps") for module in engine.module.modules()):
        from ..model.router import update_routers

        update_routers(engine.module, applied)
    if engine.weight_average is not None:
        engine.weight_average.end_step(applied)
    return StepResult(loss.detach(), norm, zero_state.loss_scale(engine), skip_is_known, aux, spike)


class PipeEngine:
    """Engine with a pipeline of one or more stages, around the pipeline engine of `tds`.

    breakdown: whether to measure the time of each kind of pipeline instruction, which synchronizes with the device.
    """

    def __init__(self, engine: Any, timers: Timers, breakdown: bool) -> None:
        self.deepspeed = engine
        self.timers = timers
        self.gas: int = engine.micro_batches
        engine.progress.breakdown = breakdown

    def train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        """Run one optimizer step with learning rate `lr`.

        batches: iterator over micro-batches, or None on a rank that reads no data.
        gas: number of micro-batches of the step on each replica; --gas if None.
        """
        engine = self.deepspeed
        engine.set_micro_batches(gas or self.gas)
        set_lr(engine, lr)
        with self.timers("train batch"):
            engine.train_batch(batches)
        engine.set_dataiterator(None)  # DeepSpeed's reference to the data iterator would keep the data workers alive
        sums = self._aux(engine.micro_batches)  # of the additional losses, by name
        divisor = engine.num_targets or 1.0  # a batch may have no target
        aux = {name: total / divisor for name, total in sums.items()}
        return end_step(engine, self._exact_loss(), engine.get_global_grad_norm(), aux)

    def eval_batch(self, batches: Batches | None) -> dict[str, float]:
        """Evaluate a global batch; return the sum `loss`, the number `targets`, and the sums of additional losses.

        The batch has --gas micro-batches on each replica, even if training steps have other numbers of them.
        """
        engine = self.deepspeed
        engine.eval_batch(batches, num_micro_batches=self.gas)
        aux = {name: total.item() for name, total in self._aux(self.gas).items()}
        loss = self._exact_loss().item() * engine.num_targets
        return {"loss": loss, "targets": engine.num_targets, **aux}

    def forward(self, micro_batches: Sequence[tuple[Any, tuple[Tensor, Tensor]]]) -> None:
        """Run the model and its loss on micro-batches (inputs, (labels, loss mask)), without training.

        All ranks call this with equal numbers of micro-batches; each replica has its own.
        """
        engine = self.deepspeed
        batch_fn = engine.batch_fn
        engine.set_batch_fn(None)  # these micro-batches already have the form that the batch function returns
        try:
            engine.eval_batch(iter(micro_batches), num_micro_batches=len(micro_batches))
        finally:
            engine.set_batch_fn(batch_fn)

    def busy(self, timed: Mapping[str, float]) -> float:
        """Return how many seconds this rank worked since the last call of `busy`, without waiting for other ranks.

        0 on accelerators. timed: the result of `Timers.take`, which the engine without a pipeline needs.
        """
        progress = self.deepspeed.progress
        seconds = progress.busy
        progress.busy = 0.0
        return float(seconds)

    def watch_steps(self, seconds: float) -> None:
        """Do nothing: `tds` watches each instruction (--pipeline-timeout), the other engine each micro-batch."""

    def times(self) -> dict[str, float]:
        """Return name -> seconds since the last call of `times`, for parts of a step that `Timers` does not measure."""
        return dict(self.deepspeed.progress.take())

    def _aux(self, gas: int) -> dict[str, Tensor]:
        """Return name -> sum of an additional loss over the last global batch, of `gas` micro-batches a replica."""
        micros = gas * self.deepspeed.dp_world_size
        return {name: mean * micros for name, mean in self.deepspeed.additional_losses.items()}

    def _exact_loss(self) -> Tensor:
        """Return the loss of the last global batch in fp64, the dtype in which the engine accumulates it."""
        return torch.stack(list(self.deepspeed.named_losses.values())).sum()

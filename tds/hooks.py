"""The parts of a pipeline engine that do not depend on its schedule: losses, norms, optimizer step, save and load."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import StockPipelineEngine
from .base_engine import Engine
from .batches import DataEnded
from .clip import clip_by_norm
from .losses import Losses, SumToShare
from .neighbours import Neighbours
from .observers import Observers
from .optimizers import drop_gradients
from .param_replicas import replica_squared_norm
from .patches import is_reduction_replaced
from .reductions import Reduction
from .saving import PipelineState, refuse_url
from .schedule import Schedule
from .start import prove_no_deadlock
from .step import Step
from .zero_settings import load_arguments


class PipelineHooks(Engine, StockPipelineEngine):  # type: ignore[misc]
    """DeepSpeed's pipeline engine with a gradient norm over all stages and complete checkpoints.

    Each rank computes its part of the squared norm. If `_squared_norm_to_share` returns it, the all-reduce that shares
    the loss also sums the parts, which saves an all-reduce. If it returns None, `_global_norm` sums the parts.
    """

    observers: Observers
    _losses: Losses
    _reduction: Reduction
    _saved_state: PipelineState
    schedule: Schedule
    _chunks: int
    _neighbours: Neighbours
    _replicas: Any  # process group of the replicas
    _step: Step
    _proven_micro_batches: set[int]  # numbers of micro-batches with which no step can deadlock
    _norm_is_shared = False  # whether this step's all-reduce of the losses also summed the squared norm

    @property
    def named_losses(self) -> dict[str, Tensor]:
        """The named losses of the last batch, scalars in fp64 over the global batch, equal on every rank."""
        return self._losses.means

    @property
    def additional_losses(self) -> dict[str, Tensor]:
        """Means of the model's `get_additional_losses()` over the last batch, scalars in fp64, on every rank."""
        return self._losses.additional

    @property
    def num_targets(self) -> float:
        """Number of targets in the last global batch, or of micro-batches if `loss_fn` has no `count_targets`."""
        return self._losses.targets

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent over stage boundaries since the engine was made."""
        return sum(sender.bytes_sent for sender in self._neighbours.senders.values())

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch size of the next steps by changing the number of micro-batches. Call it between steps.

        Raises ScheduleError if steps of this number of micro-batches could deadlock; the size then stays as it was.
        """
        old_size = self.train_batch_size()
        super().set_train_batch_size(train_batch_size)
        if self.micro_batches in self._proven_micro_batches:
            return
        try:
            prove_no_deadlock(self.schedule, self, self._chunks)
        except Exception:  # a schedule of the user may raise any
            super().set_train_batch_size(old_size)
            raise
        self._proven_micro_batches.add(self.micro_batches)

    @property
    def loss_factor(self) -> int:
        """Factor on losses that compensates for DeepSpeed's average of gradients over the replicas."""
        return self.dp_world_size if self._reduction.averages else 1

    def _squared_norm_to_share(self) -> Tensor | None:
        """Return this rank's part, a scalar, of the squared gradient norm, to be summed together with the loss.

        None if DeepSpeed computes the norm, or the gradients still have a loss scale.
        """
        is_by_deepspeed = self.has_wrapped_optimizer and not self.distributed
        if is_by_deepspeed or self.torch_autocast_z0_gradscaler:
            return None
        return self._local_squared_norm()

    def _local_squared_norm(self) -> Tensor:
        model_rank = self.grid.get_slice_parallel_rank()
        if self.distributed:
            square = self.distributed.squared_norm(model_rank, self.device)
            dist.all_reduce(square, group=self._replicas)
            return square
        return replica_squared_norm(self.module.parameters(), model_rank, self.device, self._replicas)

    def _global_norm(self) -> Tensor:
        """Return the global gradient norm, a scalar.

        The all-reduce that shares the loss may already have summed the squared norm over the ranks. If not, this
        method sums it.
        """
        if self._norm_is_shared:
            return self._losses.shared_sum.sqrt()
        total = self._local_squared_norm()
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        return total.sqrt()

    def _read_norm(self) -> float:
        """Return the global gradient norm of this step; the host waits for the device."""
        self._losses.read()
        return math.sqrt(self._losses.shared_sum_on_host)

    def clip_fp32_gradients(self) -> None:
        """Clip the gradients by the norm over all stages; DeepSpeed's method counts only the first stage's gradients.

        If the norm is not finite, or the spike guard rejects the step, the gradients are dropped, so the optimizer
        changes no weights, moments or step counts. All ranks have the same norm, so all of them skip the step. A
        `torch.amp.GradScaler` skips such steps itself.
        """
        norm_on_device = self._global_norm()
        clip_by_norm(self.module.parameters(), norm_on_device, self.gradient_clipping())
        norm = self._read_norm() if self._norm_is_shared else norm_on_device.item()
        self._global_grad_norm = norm
        if self.torch_autocast_z0_gradscaler:
            return
        if self.spike_guard:
            norm = self.spike_guard.inf_if_spike(norm)
        self.optimizer.overflow = not math.isfinite(norm)  # DeepSpeed counts this as a skipped step
        if self.optimizer.overflow:
            drop_gradients(self.optimizer)

    # DeepSpeed's `_exec_optimizer_step`, at the end of a schedule, calls in this order: this method, the one of
    # `base_engine.Engine`, and DeepSpeed's, which clips by `clip_fp32_gradients` above and steps the optimizer.
    def _take_model_step(self, lr_kwargs: Any) -> None:
        if self.spike_guard:
            self._losses.read()
            self.spike_guard.begin(torch.stack(list(self.named_losses.values())).sum())
        if self.distributed and self.spike_guard:
            norm = self.spike_guard.inf_if_spike(self._global_norm())
            self.optimizer.clip(norm, self.gradient_clipping(), read_norm=norm.item)
        elif self.distributed:
            self.optimizer.clip(self._global_norm(), self.gradient_clipping(), read_norm=self._read_norm)
        elif not self.has_wrapped_optimizer and not self.gradient_clipping():
            # DeepSpeed calls clip_fp32_gradients only if clipping is on. Without clipping, call it here, because it
            # also skips the step if the norm is not finite. DeepSpeed's optimizer wrappers skip such steps themselves.
            self.clip_fp32_gradients()
        super()._take_model_step(lr_kwargs)

    def _count_targets(self) -> None:
        """Count the targets of the whole step, by which the losses are divided."""
        self.observers.waiting("counting the targets of its micro-batches")
        loss_fn = self.module.loss_fn
        self._losses.count(loss_fn.count_targets, self._step.batches.all_labels(), self._replicas)
        if hasattr(loss_fn, "mean_targets"):
            loss_fn.mean_targets = self._losses.mean_counts

    def _share_losses(self, squared_norm: Tensor | None = None) -> Losses:
        """Sum the losses over the replicas and broadcast them to all stages.

        squared_norm: this rank's part of the squared gradient norm; the same all-reduce sums it over the ranks.
        """
        self.observers.waiting("sharing the loss")
        if self._is_last_stage:
            self._losses.reduce(self._replicas)
        source = self.grid.stage_to_global(stage_id=self.num_stages - 1)
        with_sum = None
        if squared_norm is not None:
            # The tensor-parallel ranks of the last stage have equal losses, so only the first of them adds them.
            adds_losses = self._is_last_stage and self.grid.get_slice_parallel_rank() == 0
            with_sum = SumToShare(adds_losses, squared_norm, self.grid.get_model_parallel_group())
        self._losses.share(source, self.grid.get_pipe_parallel_group(), with_sum)
        self._norm_is_shared = squared_norm is not None
        return self._losses

    def _announce_data_end(self, end: DataEnded) -> None:
        """Inform the next stages that the data ended before the step began."""
        if not self._is_last_stage:
            self._neighbours.to_next.send_end()
        end.everywhere = True

    def _report(self, name: str, loss: Tensor) -> None:
        """Write the loss, and named losses if there are several, to DeepSpeed's monitors."""
        if self.global_rank != 0 or not self.monitor.enabled:
            return
        named = {name: loss}
        prefix = name.removesuffix("loss").removeprefix("train_")  # "eval_" in an evaluation
        if len(self._losses.all_means) > 1:
            for key, value in self._losses.all_means.items():
                named.setdefault(prefix + key, value)
        events = []
        for key, value in named.items():
            events.append((f"Train/Samples/{key}", value.item(), self.global_samples))
        self.monitor.write_events(events)

    def buffered_allreduce_fallback(self, *args: Any, **kwargs: Any) -> None:
        """Reduce the gradients over the replicas; for a single replica, skip DeepSpeed's copies of all gradients."""
        if self.dp_world_size > 1 or is_reduction_replaced(type(self)):
            super().buffered_allreduce_fallback(*args, **kwargs)

    def save_checkpoint(self, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save DeepSpeed's checkpoint, the partition of the layers, and state outside the layers (see saving.py)."""
        refuse_url(save_dir)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._saved_state.save(Path(save_dir, tag))
        return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint. Raises ValueError for optimizer states of another partition of the layers."""
        arguments = load_arguments(self, load_dir, tag, *args, **kwargs)
        with_optimizer = arguments.get("load_optimizer_states", True) and not arguments.get("load_module_only")
        self._saved_state.load(Path(load_dir), tag, with_optimizer)
        return super().load_checkpoint(**arguments)

"""Base classes of tds's PipelineEngine: DeepSpeed's engine, extended, and what does not depend on the schedule.

Models without a pipeline are trained by the first class itself.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import StockPipelineEngine, configure_compression
from .average import WeightAverage
from .batches import DataEnded
from .distributed_optimizer import DistributedOptimizer
from .engine_classes import ExtendedEngine, PipelineOverrides
from .layout import close_gaps, make_rows_contiguous
from .losses import Losses, SumToShare
from .module_changes import KnownModel
from .neighbours import Neighbours
from .observers import Observers
from .optimizer_state import drop_skipped_gradients
from .optimizers import refuse_closures, refuse_foreign
from .param_replicas import replica_squared_norm
from .pipe import tied_weights
from .reductions import Reduction
from .sequential import chunk_of_weights
from .sparse import make_dense, refuse_sparse, sparse_weights
from .spikes import SpikeGuard
from .step import Step
from .zero_settings import naming_keys, refuse_dtypes, refuse_quantization_on_cpus, refuse_unsupported


class Engine(ExtendedEngine):
    """DeepSpeed's engine, extended to accept a DistributedOptimizer and to detect weights that the user replaced.

    A DistributedOptimizer reduces its gradients itself. Without a pipeline, call its `arm()` before the last
    `backward()` of a step and `finish()` after it, then its `clip(norm, limit)` and the engine's `step()`. With any
    other optimizer, a weight that no replica used has no gradient after the reduction, so weight decay skips it.
    """

    basic_optimizer: Any  # the optimizer without DeepSpeed's wrapper
    optimizer: Any
    spike_guard: SpikeGuard | None = None  # set by a SpikeGuard
    weight_average: WeightAverage | None = None  # set by a WeightAverage
    _skips: int | Tensor = 0  # number of skipped steps; a scalar on the device if the host has not read it yet

    @property
    def distributed(self) -> DistributedOptimizer | None:
        """The optimizer, if it is a DistributedOptimizer, else None."""
        return self.optimizer if isinstance(self.optimizer, DistributedOptimizer) else None

    @property
    def has_wrapped_optimizer(self) -> bool:
        """True if a DeepSpeed optimizer wraps the user's optimizer and clips the gradients."""
        return bool(self.fp16_enabled() or self.bfloat16_enabled() or self.zero_optimization())

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps. Reading it may wait for the device."""
        self._skips = int(self._skips)
        return self._skips

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        """Set the number of skipped steps, as DeepSpeed does when it loads a checkpoint."""
        self._skips = count

    @cached_property
    def known_model(self) -> KnownModel:
        """Record of the module's weights and layers at the time when the optimizer was attached."""
        return KnownModel(self.module)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch size of the next steps by changing the number of micro-batches. Call it between steps.

        Raises ValueError if the replicas cannot share a batch of this size.
        """
        super().set_train_batch_size(train_batch_size)
        # DeepSpeed ends a step when this count is a multiple of the accumulation steps, so it must restart from 0.
        self.micro_steps = 0

    def set_micro_batches(self, number: int) -> None:
        """Set the number of micro-batches of the next steps on each replica. Call it between two steps."""
        if number != self.gradient_accumulation_steps():
            self.set_train_batch_size(number * self.train_micro_batch_size_per_gpu() * self.dp_world_size)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Set `self.optimizer`, by DeepSpeed's method unless the user gives a DistributedOptimizer."""
        if callable(client_optimizer):  # called before the checks below, which need the optimizer
            client_optimizer = client_optimizer(model_parameters)
        self.known_model  # noqa: B018  # a cached property, whose first use records the model
        refuse_closures(client_optimizer)
        refuse_foreign(self.module, client_optimizer)  # one with weights of another model
        refuse_quantization_on_cpus(self)
        self._sum_gradients_in_fp64()  # if there are fp64 weights
        if self.zero_optimization_stage() == 3:
            make_rows_contiguous(self.module)  # ZeRO 3 shards each weight as a flat tensor
        if isinstance(client_optimizer, DistributedOptimizer):
            refuse_unsupported(self, client_optimizer)
            self.basic_optimizer = client_optimizer.optimizer
            self.optimizer = client_optimizer
            chunks = chunk_of_weights(self.module)
            client_optimizer.attach(self.module, self.seq_data_parallel_group, chunks, apart=tied_weights(self.module))
            self.enable_backward_allreduce = False  # the optimizer reduces the gradients
            configure_compression(self)  # some releases do this in DeepSpeed's method, which is not called here
            return
        if self.has_wrapped_optimizer:
            refuse_dtypes(self, client_optimizer)
            make_dense(sparse_weights(self.module))  # DeepSpeed's optimizers flatten gradients
        else:
            refuse_sparse(self.module, client_optimizer)
            close_gaps(self.module)  # the user's optimizer, or the one of the ds_config, may be fused
        with naming_keys(self):
            super()._configure_optimizer(client_optimizer, model_parameters)
        refuse_closures(self.basic_optimizer)  # the ds_config may name such an optimizer, too

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """Step the optimizer by DeepSpeed's method, and count the step if a NaN or Inf in the norm made it a no-op."""
        optimizer = self.distributed
        self.known_model.check_weights(self.optimizer, self.has_wrapped_optimizer and not optimizer)
        unread_norm = None  # the norm, if the host does not read it in this step
        # Without a pipeline, `clip(norm, limit)` gets no function `read_norm` that reads the norm on the host.
        if optimizer is not None and optimizer.norm is not None and optimizer.read_norm is None:
            if self.lr_scheduler is None:
                unread_norm = optimizer.norm
            else:
                # With `read_norm`, the optimizer sets `overflow`; else a skipped step would advance the lr schedule.
                optimizer.read_norm = optimizer.norm.item
        super()._take_model_step(lr_kwargs)
        if unread_norm is not None:  # DeepSpeed has not counted this step if it was skipped, so the device counts it
            is_skipped = ~unread_norm.isfinite()
            self._skips = self._skips + is_skipped.long()
        if optimizer is not None:
            optimizer.zero_grad()
        drop_skipped_gradients(self)

    @contextmanager
    def _discarding_gradients(self) -> Iterator[None]:
        """Drop all gradients if the `with` block, a step, raises, so that the next step does not add to them."""
        try:
            yield
        except BaseException:
            if self.optimizer is not None:
                with suppress(RuntimeError):  # if the device has failed, the first error is the one to raise
                    self.optimizer.zero_grad()
            raise


class PipelineHooks(PipelineOverrides, Engine, StockPipelineEngine):  # type: ignore[misc]
    """DeepSpeed's pipeline engine with a gradient norm over all stages and complete checkpoints.

    Each rank computes its part of the squared norm. If `_squared_norm_to_share` returns it, the all-reduce that shares
    the loss also sums the parts, which saves an all-reduce. If it returns None, `_global_norm` sums the parts.
    """

    observers: Observers
    _losses: Losses
    _reduction: Reduction
    _neighbours: Neighbours
    _step: Step  # the current or the last step
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

    @property
    def loss_factor(self) -> int:
        """Factor on losses that compensates for DeepSpeed's average of gradients over the replicas."""
        return self.dp_world_size if self._reduction.averages else 1

    def _squared_norm_to_share(self) -> Tensor | None:
        """Return this rank's part, a scalar, of the squared gradient norm, to be summed together with the loss.

        None if DeepSpeed computes the norm.
        """
        is_by_deepspeed = self.has_wrapped_optimizer and not self.distributed  # ZeRO, fp16 or bf16, but not by tds
        if is_by_deepspeed:
            return None
        return self._local_squared_norm()

    def _local_squared_norm(self) -> Tensor:
        """Return this rank's part of the squared gradient norm, a scalar; the ranks of a replica sum these parts."""
        model_rank = self.grid.get_slice_parallel_rank()  # tensor-parallel; only rank 0 counts unsharded weights
        if self.distributed:  # else the replicas hold equal gradients, except those of experts
            square = self.distributed.squared_norm(model_rank, self.device)
            dist.all_reduce(square, group=self._replicas)  # each replica holds a shard of the gradients
            return square
        return replica_squared_norm(self.module.parameters(), model_rank, self.device, self._replicas)

    def _global_norm(self) -> Tensor:
        """Return the global gradient norm, a scalar."""
        if self._norm_is_shared:  # the all-reduce of the losses has already summed the squared norm
            return self._losses.shared_sum.sqrt()
        total = self._local_squared_norm()
        dist.all_reduce(total, group=self.grid.get_model_parallel_group())
        return total.sqrt()

    def _read_norm(self) -> float:
        """Return the global gradient norm of this step; the host waits for the device."""
        self._losses.read()
        return math.sqrt(self._losses.shared_sum_on_host)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        """Clip by the norm over all stages and step; DeepSpeed's `_exec_optimizer_step` calls this after a schedule."""
        if self.spike_guard:
            self._losses.read()  # until then, `named_losses` are those of the last step
            self.spike_guard.begin(torch.stack(list(self.named_losses.values())).sum())
        if self.distributed:
            # The optimizer scales by the norm on the device; `step()` calls `read_norm` to read it on the host.
            norm = self._global_norm()
            read_norm: Any = self._read_norm
            if self.spike_guard:
                norm = self.spike_guard.inf_if_spike(norm)
                read_norm = norm.item
            self.optimizer.clip(norm, self.gradient_clipping(), read_norm=read_norm)
        elif not self.has_wrapped_optimizer and not self.gradient_clipping():
            # DeepSpeed calls clip_fp32_gradients only if clipping is on. Without clipping, call it here, because it
            # also skips the step if the norm is not finite. DeepSpeed's optimizer wrappers skip such steps themselves.
            self.clip_fp32_gradients()
        super()._take_model_step(lr_kwargs)  # Engine's, then DeepSpeed's, which clips by `clip_fp32_gradients`

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

"""DeepSpeed's engine, extended for DistributedOptimizer: the base class of tds's PipelineEngine.

Models without a pipeline are trained by this class itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import BF16_Optimizer, DeepSpeedEngine, configure_compression
from .average import WeightAverage
from .distributed_optimizer import DistributedOptimizer
from .layout import flattened_for_broadcast, flattened_scalars, make_rows_contiguous
from .module_changes import KnownModel
from .optimizer_state import drop_skipped_gradients, wait_for_weights
from .optimizers import refuse_closures
from .param_replicas import group_by_holders, holder_group
from .pipe import chunk_of_weights, tied_weights
from .saving import refuse_url, warn_of_copies
from .sparse import make_dense, refuse_sparse, sparse_weights
from .spikes import SpikeGuard
from .zero_settings import load_arguments, naming_keys, refuse_quantization_on_cpus, refuse_unsupported


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine, extended to accept a DistributedOptimizer and to detect weights that the user replaced.

    A DistributedOptimizer reduces its gradients itself. Without a pipeline, call its `arm()` before the last
    `backward()` of a step and `finish()` after it, then its `clip(norm, limit)` and the engine's `step()`. With any
    other optimizer, a weight that no replica used has no gradient after the reduction, so weight decay skips it.
    """

    optimizer: Any
    spike_guard: SpikeGuard | None = None  # set by a SpikeGuard
    weight_average: WeightAverage | None = None  # set by a WeightAverage
    _untied: Sequence[str] = ()  # a pipeline engine's warnings about weights that stages share without a tie
    _skips_on_host = 0
    _skips_on_device: Tensor | None = None  # number of skipped steps that the host has not read yet, a scalar
    _has_compared_buffers = False  # whether the first save has compared the replicas' buffers

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
        if self._skips_on_device is not None:
            self._skips_on_host += int(self._skips_on_device.item())
            self._skips_on_device = None
        return self._skips_on_host

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        """Set the number of skipped steps, as DeepSpeed does when it loads a checkpoint."""
        self._skips_on_host = count
        self._skips_on_device = None

    @cached_property
    def known_model(self) -> KnownModel:
        """Record of the module's weights and layers at the time when the optimizer was attached."""
        return KnownModel(self.module)

    def _adopt_new_layers(self) -> None:
        """Run the layers that are registered now. Layers put in later have no hooks that wait for gathered weights."""
        if self.known_model.adopt_new_layers():
            wait_for_weights(self)

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
        self.known_model  # noqa: B018  # records the model now
        refuse_closures(client_optimizer)
        refuse_quantization_on_cpus(self)
        self._sum_gradients_in_fp64()
        if self.zero_optimization_stage() == 3:
            make_rows_contiguous(self.module)
        if not isinstance(client_optimizer, DistributedOptimizer):
            if self.has_wrapped_optimizer:
                make_dense(sparse_weights(self.module))
            else:
                refuse_sparse(self.module, client_optimizer)
            with naming_keys(self):
                super()._configure_optimizer(client_optimizer, model_parameters)
            return
        refuse_unsupported(self, client_optimizer)
        self.basic_optimizer = client_optimizer.optimizer
        self.optimizer = client_optimizer
        client_optimizer.attach(
            self.module, self.seq_data_parallel_group, chunk_of_weights(self.module), apart=tied_weights(self.module)
        )
        self.enable_backward_allreduce = False
        configure_compression(self)

    def _sum_gradients_in_fp64(self) -> None:
        """Sum fp64 gradients over replicas in fp64: DeepSpeed sums in fp32 unless communication_data_type is given."""
        if self.has_wrapped_optimizer or self._config.communication_data_type is not None:
            return
        if any(p.dtype is torch.float64 for p in self.module.parameters()):
            self._config.communication_data_type = torch.float64

    def _broadcast_model(self) -> None:
        """Broadcast the first replica's weights, but weights that only some replicas hold only among these."""
        replicas = self.seq_data_parallel_group
        with flattened_for_broadcast(self.module):
            if len(group_by_holders(self.module.parameters(), replicas)) == 1:  # all replicas hold all weights
                super()._broadcast_model()
                return
            for p in self.module.parameters():
                group = holder_group(p, replicas)
                dist.broadcast(p.data, dist.get_process_group_ranks(group)[0], group=group)

    def clip_fp32_gradients(self) -> None:
        """Clip the gradients as DeepSpeed does, those of weights of dimension 0, too."""
        with flattened_scalars(self.module):
            super().clip_fp32_gradients()

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients as DeepSpeed does, but leave a weight's `.grad` None if no replica has a gradient for it."""
        # DeepSpeed replaces a missing `.grad` by zeros. Its bf16 optimizer does not: it reduces its own fp32 gradients.
        if grads is not None or isinstance(self.optimizer, BF16_Optimizer):
            super().buffered_allreduce_fallback(grads, *args, **kwargs)
            return
        from .zero_reductions import keep_missing_grads

        with keep_missing_grads(self.module, self.seq_data_parallel_group):
            super().buffered_allreduce_fallback(grads, *args, **kwargs)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self.known_model.check_weights(self.optimizer)
        optimizer = self.distributed
        # Without `read_norm`, the host does not learn in this step whether it is skipped, so the device counts skips.
        norm_on_device = None
        if optimizer is not None and optimizer.read_norm is None:
            norm_on_device = optimizer.norm
        if optimizer is not None and norm_on_device is not None and self.lr_scheduler is not None:
            # Without `overflow`, DeepSpeed would advance the lr schedule for a skipped step.
            optimizer.read_norm = norm_on_device.item
            norm_on_device = None
        super()._take_model_step(lr_kwargs)
        if norm_on_device is not None:
            skips = 0 if self._skips_on_device is None else self._skips_on_device
            self._skips_on_device = skips + (~norm_on_device.isfinite()).long()
        if self.distributed:
            self.optimizer.zero_grad()
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

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state as DeepSpeed does, with the complete weights of the last step."""
        wait_for_weights(self)
        return super().module_state_dict(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does, after the last step's gathers, which would otherwise overwrite what is loaded."""
        wait_for_weights(self)
        return super().load_checkpoint(**load_arguments(self, *args, **kwargs))

    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as DeepSpeed does; at the first save, also warn of buffers whose copies differ.

        Raises ValueError for a URL.
        """
        refuse_url(save_dir)
        wait_for_weights(self)
        if not self._has_compared_buffers:
            self._has_compared_buffers = True
            warn_of_copies(self.module, self.seq_data_parallel_group)
        return super().save_checkpoint(save_dir, *args, **kwargs)

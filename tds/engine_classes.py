"""The engine classes that `deepspeed.initialize` may choose, and those that a client derives from DeepSpeed's."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._deepspeed import BF16_Optimizer, DeepSpeedEngine, StockPipelineModule, deepspeed
from .clip import clip_by_norm
from .layout import flattened_for_broadcast, flattened_scalars
from .messages import say
from .optimizer_state import wait_for_weights
from .optimizers import skip_step
from .param_replicas import holder_group
from .patches import PACKAGE, foreign_name, is_reduction_replaced
from .saving import PipelineState, refuse_url, warn_of_copies
from .start import prove_no_deadlock
from .zero_settings import load_arguments


@contextmanager
def use_engine_classes(pipeline: type, plain: type) -> Iterator[None]:
    """Make `deepspeed.initialize` build `pipeline` for a PipelineModule and `plain` for any other model.

    DeepSpeed's engines for other modules and settings, such as DualPipeVEngine, raise ValueError. A subclass of tds's
    engine that the user has put in place of DeepSpeed's is built instead; anything else in its place raises ValueError.
    """
    # What to restore at the end. The first two are named, because `engines()` lacks them if a user has put something
    # else in their place.
    original = {"PipelineEngine": deepspeed.PipelineEngine, "DeepSpeedEngine": deepspeed.DeepSpeedEngine, **engines()}
    pipeline_class = _class_to_build("PipelineEngine", pipeline)
    plain_class = _class_to_build("DeepSpeedEngine", plain)
    # `deepspeed.initialize` looks up its engine by name. tds has only two of them; the others raise an error.
    for name in original:
        setattr(deepspeed, name, partial(_refuse_engine, name))
    deepspeed.PipelineEngine = pipeline_class
    deepspeed.DeepSpeedEngine = plain_class
    try:
        yield
    finally:
        for name, original_class in original.items():
            setattr(deepspeed, name, original_class)


def _class_to_build(name: str, tds_class: type) -> Any:
    """Return the class to build where DeepSpeed has `deepspeed.NAME`: the user's subclass of `tds_class`, or it."""
    user_class = getattr(deepspeed, name)
    if not foreign_name(user_class):
        return tds_class
    if isinstance(user_class, type) and issubclass(user_class, tds_class):
        return user_class
    raise ValueError(
        f"deepspeed.{name} is replaced by {foreign_name(user_class)}, which {PACKAGE}.initialize does not build: "
        f"derive it from {PACKAGE}.{name}"
    )


def warn_of_stock_engines(tds_class: type) -> None:
    """Make DeepSpeed's engines report on rank 0 that they are built for a PipelineModule, unless they are tds's.

    A project may also have a copy of DeepSpeed's PipelineEngine, derived from DeepSpeedEngine.
    """
    original_init = DeepSpeedEngine.__init__

    @wraps(original_init)
    def init(engine: Any, *args: Any, **kwargs: Any) -> None:
        original_init(engine, *args, **kwargs)
        runs_pipeline = isinstance(engine.module, StockPipelineModule)
        if runs_pipeline and not isinstance(engine, tds_class) and engine.global_rank == 0:
            kind = type(engine)
            say(
                f"warning: {kind.__module__}.{kind.__qualname__} is DeepSpeed's pipeline engine or a copy of it, but "
                f"{PACKAGE} is imported: use {PACKAGE}.initialize, or derive the class from {PACKAGE}.PipelineEngine"
            )

    DeepSpeedEngine.__init__ = init


def engines() -> dict[str, type]:
    """Return the engine classes for training that the package deepspeed has, by name."""
    attributes = vars(deepspeed).items()
    return {name: each for name, each in attributes if isinstance(each, type) and issubclass(each, DeepSpeedEngine)}


def _refuse_engine(name: str, *_: Any, model: Any = None, **__: Any) -> Any:
    """Raise ValueError in place of building DeepSpeed's engine `name`, with the setting that asks for it."""
    if name == "DeepSpeedHybridEngine":
        cause = 'the section "hybrid_engine" of the ds_config; leave it out'
    else:
        cause = f"a {type(model).__name__}; use tds.PipelineModule, whose schedules are in docs/tds.md"
    raise ValueError(f"tds does not have DeepSpeed's {name}, which it would use because of {cause}")


class DeepSpeedMethods:
    """First base class of tds's PipelineEngine.

    A client's engine calls methods such as `super(PipelineEngine, self).forward(inputs)`, since DeepSpeed's
    PipelineEngine disables its own. But above tds's PipelineEngine comes DeepSpeed's, so this class stands between.
    """

    forward = DeepSpeedEngine.forward
    backward = DeepSpeedEngine.backward
    step = DeepSpeedEngine.step

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of this stage's module, which the PipelineEngine writes to files instead."""
        wait_for_weights(self)
        return DeepSpeedEngine.module_state_dict(self, *args, **kwargs)


def _run_in_dtype_of_statistics(norm: Any, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the output, [...] as `inputs`, of a BatchNorm or InstanceNorm, with its weights cast for this call."""
    # norm.weight and norm.bias look up this dict, so another dict changes them for this call only. Gradients pass
    # through the casts to the weights themselves.
    weights = norm._parameters
    cast_weights = dict(weights)  # a weight that the norm does not have is None and stays so
    for name, p in norm.named_parameters():
        cast_weights[name] = p.to(norm.running_mean.dtype)
    norm._parameters = cast_weights
    try:
        return forward(inputs)
    finally:
        norm._parameters = weights


class ExtendedEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine with sums in fp64, weights that only some replicas hold, and checkpoints of whole weights."""

    _has_compared_buffers = False  # whether the first save has compared the replicas' buffers

    def _configure_distributed_model(self, model: Any) -> None:
        """Cast the weights of the module and move the module to the device, as DeepSpeed does."""
        super()._configure_distributed_model(model)
        if not (self.fp16_enabled() or self.bfloat16_enabled()):
            return
        # The kernels of BatchNorm need weights in the dtype of the running statistics, which DeepSpeed does
        # not cast. Norms that keep such statistics have the attribute `track_running_stats`.
        for norm in self.module.modules():
            if getattr(norm, "track_running_stats", False):
                norm.forward = partial(_run_in_dtype_of_statistics, norm, norm.forward)

    def zero_grad(self) -> None:
        """Drop all gradients, also those that a DistributedOptimizer has summed since the last step."""
        super().zero_grad()
        if self.distributed is not None:
            self.distributed.zero_grad()

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
            if not any(hasattr(p, "replica_group") for p in self.module.parameters()):
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

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state as DeepSpeed does, with the complete weights of the last step."""
        wait_for_weights(self)
        return super().module_state_dict(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does, after the last step's gathers, which would otherwise overwrite what is loaded."""
        wait_for_weights(self)
        arguments = load_arguments(self, *args, **kwargs)
        if isinstance(self.optimizer, BF16_Optimizer):
            # Without ZeRO, DeepSpeed saves the state of this optimizer as that of ZeRO, but does not load it as such.
            # During the load, this attribute of the engine hides the class's method of the same name.
            self.__dict__["zero_optimization"] = lambda: True
        try:
            loaded = super().load_checkpoint(**arguments)
        finally:
            self.__dict__.pop("zero_optimization", None)
        # If only weights were loaded, the fp32 copies are still those of before, and the next step would restore them.
        if not arguments.get("load_optimizer_states", True) and hasattr(self.optimizer, "refresh_fp32_params"):
            self.optimizer.refresh_fp32_params()
        return loaded

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


class PipelineOverrides(ExtendedEngine):
    """Methods of DeepSpeed's engine in the form that a pipeline needs; this base class comes before `Engine`."""

    _saved_state: PipelineState
    _proven_micro_batches: set[int]  # numbers of micro-batches with which no step can deadlock

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch size of the next steps by changing the number of micro-batches. Call it between steps.

        Raises ScheduleError if steps of this number of micro-batches could deadlock; the size then stays as it was.
        """
        old_size = self.train_batch_size()
        super().set_train_batch_size(train_batch_size)
        if self.micro_batches in self._proven_micro_batches:
            return
        try:
            prove_no_deadlock(self.schedule, self)
        except Exception:  # a schedule of the user may raise any
            super().set_train_batch_size(old_size)
            raise
        self._proven_micro_batches.add(self.micro_batches)

    def clip_fp32_gradients(self) -> None:
        """Clip the gradients by the norm over all stages; DeepSpeed's method counts only the first stage's gradients.

        If the norm is not finite, or the spike guard rejects the step, the optimizer is not called, so it changes no
        weights, moments or step counts. All ranks have the same norm, so all of them skip the step.
        """
        norm_on_device = self._global_norm()
        clip_by_norm(self.module.parameters(), norm_on_device, self.gradient_clipping())
        if self._norm_is_shared:
            norm = self._read_norm()  # with all losses, in one copy from the device
        else:
            norm = norm_on_device.item()
        self._global_grad_norm = norm
        if self.spike_guard:
            norm = self.spike_guard.inf_if_spike(norm)
        self.optimizer.overflow = not math.isfinite(norm)  # DeepSpeed counts this as a skipped step
        if self.optimizer.overflow:
            skip_step(self.optimizer)

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
        self._saved_state.load(Path(load_dir), tag, with_optimizer, self.load_universal_checkpoint())
        return super().load_checkpoint(**arguments)

"""Recorder of one rank's initial values, module outputs, gradients and losses over a few training steps.

Each rank writes one file, which contains only tensors and plain Python values. Outputs and gradients are recorded in
the first step only. Hooks take each gradient from autograd, before any reduction over replicas.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron import mpu
from megatron.atomic import write_text
from megatron.engines.engine import Batches, Engine, PipeEngine, StepResult
from megatron.model.layers import global_buffers, global_parameters
from megatron.ranks.replicas import fingerprint
from megatron.training import health, setup
from tds import optimizer_state as zero_state

MAX_OUTPUT_BYTES = 2**31  # a rank stops recording outputs when they exceed this many bytes


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (global name, module) of each layer on this rank.

    The layers of a model without a `named_layers` method are its children.
    """
    named_layers_of: Any = getattr(model, "named_layers", None)
    if named_layers_of is not None:
        yield from named_layers_of()
        return
    tied = getattr(model, "tied_modules", nn.ModuleDict())
    for key, module in tied.items():
        yield f"tied_modules.{key}", module
    for name, module in model.named_children():
        if module is not tied:
            yield name, module


def _tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, in order."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors_in(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _tensors_in(value)


class Recorder:
    """Recorder of the training on this rank. After `steps` steps, it writes `folder/rank<r>.pt`.

    records_all_micros: whether to record the outputs of all micro-batches instead of only the first one.
    """

    def __init__(self, folder: Path, steps: int, records_all_micros: bool) -> None:
        self.folder = folder
        self.steps = steps
        self.records_all_micros = records_all_micros
        self.losses: list[float] = []
        self.outputs: list[dict[str, Any]] = []
        self.gradients: dict[str, Tensor] = {}
        self._current_pass: tuple[int, int] | None = None  # (micro-batch, chunk) during a recorded forward pass
        self._call_counts: Counter[Any] = Counter()
        self._running_modules: list[str] = []  # names of the modules whose forward is running in this pass
        self._output_bytes = 0
        self._hooks = list[Any]()

    def attach(self, engine: Engine) -> Engine:
        """Attach the recorder to an engine, and return the engine."""
        self._engine = engine.deepspeed
        self._model = engine.deepspeed.module
        mesh = mpu.get_mesh()
        # pipe, data, model: this rank's index on each axis. share: (index, number of shares) of the samples that this
        # rank gets. kinds: module name -> class name. specs: parameter name -> its sharding.
        self.record: dict[str, Any] = {
            "pipe": mesh.pipe.rank,
            "data": mesh.data.rank,
            "model": mesh.model.rank,
            "share": tuple(mesh.share),
            "context": mesh.context.size,
            "expert": mesh.expert.size,
            "layers": [],
            "kinds": {},
            "specs": {},
            "weights": {},
        }
        for layer_name, layer in named_layers(self._model):
            self.record["layers"].append(layer_name)
            for inner_name, module in layer.named_modules():  # the first one is the layer itself, with the name ""
                name = f"{layer_name}.{inner_name}" if inner_name else layer_name
                self.record["kinds"][name] = type(module).__name__
                self._hooks += [
                    module.register_forward_pre_hook(partial(self._enter_module, name)),
                    module.register_forward_hook(partial(self._leave_module, name)),
                ]
        for name, parameter in global_parameters(self._model):
            spec = mpu.spec_of(parameter)
            self.record["specs"][name] = {
                "dim": spec.dim,
                "full": spec.full_shape,
                "local": spec.local_shape,
                # (dim, begin, end) in the full tensor; a scalar is treated like a vector of one element.
                "rows": tuple(spec.rows) if spec.local_shape else (0, 0, 1),
            }
            self.record["weights"][name] = zero_state.get_weight(parameter).detach().cpu().clone()
            if parameter.requires_grad:
                hook = parameter.register_hook(partial(self._add_gradient, name))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._initial_buffers = _copy_buffers(self._model)
        # Passes and steps are recorded by methods that replace those of the engine and call them.
        self._track_passes(engine)
        self._original_train_batch = engine.train_batch
        engine.train_batch = self._train_batch  # type: ignore[method-assign]
        return engine

    def _track_passes(self, engine: Any) -> None:
        """Replace the engine's forward pass by one that sets the current micro-batch, `self._current_pass`.

        When a backward pass recomputes layers, `self._current_pass` is None, so that no output is recorded twice.
        """
        if isinstance(engine, PipeEngine):
            deepspeed = engine.deepspeed
            original_forward = deepspeed._forward

            def forward(instruction: Any) -> None:
                self._run_pass(instruction.micro, instruction.chunk, lambda: original_forward(instruction))

            deepspeed._forward = forward
            self.record["scale"] = deepspeed.loss_factor
            return
        original_loss = engine.loss
        # The engine computes one loss per micro-batch. Only the numbers in the first step are recorded, from 0 on.
        numbers = itertools.count()

        def compute_loss(model: Any, batch: Any) -> Any:
            return self._run_pass(next(numbers), 0, lambda: original_loss(model, batch))

        engine.loss = compute_loss
        # records.py divides the recorded gradients by this factor, which makes up for averaging over replicas. The
        # engine multiplies losses by factor(gas), but DeepSpeed divides them by gas before the hooks see gradients.
        self.record["scale"] = engine.factor(1)

    def _run_pass(self, micro: int, chunk: int, run: Callable[[], Any]) -> Any:
        """Run a forward pass, and record its outputs if they are wanted; write the module in which it fails."""
        # A module that the last backward pass recomputed may still be in the list: recomputation stops, without calling
        # `_leave_module`, as soon as it has the tensors that it needs.
        self._running_modules.clear()
        self._current_pass = None
        is_recorded_step = self._model.training and not self.losses  # the first step has no loss yet
        if is_recorded_step and (self.records_all_micros or micro == 0):
            # While this is set, the hook `_leave_module` of each module records the module's outputs.
            self._current_pass = (micro, chunk)
        try:
            return run()
        except Exception:
            if self._running_modules:
                # An error skips `_leave_module`, so the last name in the list is the module that failed.
                write_text(self.folder / f"stopped{dist.get_rank()}", self._running_modules[-1])
            raise
        finally:
            self._current_pass = None

    def _enter_module(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._running_modules.append(name)

    def _leave_module(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Record a module's outputs; called after its forward."""
        if self._running_modules:
            self._running_modules.pop()
        if self._current_pass is None or self._output_bytes > MAX_OUTPUT_BYTES:
            return
        micro, chunk = self._current_pass
        # A module may be called several times in a pass, such as a tied embedding.
        call_index = self._call_counts[micro, chunk, name]
        self._call_counts[micro, chunk, name] += 1
        for index, tensor in enumerate(_tensors_in(outputs)):
            value = tensor.detach().cpu().clone()
            self._output_bytes += value.nbytes
            self.outputs.append(
                {"micro": micro, "chunk": chunk, "name": name, "call": call_index, "number": index, "value": value}
            )

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        # The first step has no loss yet. Its micro-batches add up, as do all uses of a tied parameter.
        if not self.losses:
            dtype = torch.promote_types(gradient.dtype, torch.float64)  # fp64, or complex128 for complex gradients
            value = gradient.detach().to(dtype).cpu()
            self.gradients[name] = self.gradients.get(name, 0.0) + value

    def _train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        """Run a training step and record its loss; write everything after the last step."""
        step = self._original_train_batch(batches, lr, gas)
        self.losses.append(float(step.loss))
        if len(self.losses) == self.steps:
            self._write()
        return step

    def _write(self) -> None:
        """Write the record of this rank."""
        for hook in self._hooks:
            hook.remove()
        buffers = _copy_buffers(self._model)
        changed_buffers = []
        for name, value in buffers.items():
            if not torch.equal(value, self._initial_buffers[name]):
                changed_buffers.append(name)
        zero_state.wait_for_weights(self._engine)
        trained_fingerprints = {}
        for name, parameter in global_parameters(self._model):
            trained_fingerprints[name] = int(fingerprint(zero_state.get_weight(parameter)))
        record = {
            **self.record,
            "losses": self.losses,
            "outputs": self.outputs,
            "gradients": self.gradients,
            "trained": trained_fingerprints,
            "buffers": buffers,
            "changed": changed_buffers,
            "cut_short": self._output_bytes > MAX_OUTPUT_BYTES,
        }
        torch.save(record, self.folder / f"rank{dist.get_rank()}.pt")


def _copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().cpu().clone() for name, buffer in global_buffers(model)}


def record_run(folder: Path, steps: int) -> Callable[[], None]:
    """Record all runs that start in this process from now on into `folder`. Return a function that ends the recording.

    Recording replaces `megatron.training.setup.build_engine`, which a run calls once to get its engine. Recorded runs
    do not compare the copies of weights: unequal copies are found in the records, with the layer that causes them.
    """
    setup_module: Any = setup
    original_build = setup_module.build_engine
    health_module: Any = health
    original_check = health_module.check_replicas

    def build_engine(*args: Any) -> Engine:
        # A run in one process is the reference. Other runs record the first micro-batch of each replica, and each of
        # these is some micro-batch of the reference.
        is_reference = dist.get_world_size() == 1
        return Recorder(folder, steps, is_reference).attach(original_build(*args))

    def undo() -> None:
        setup_module.build_engine = original_build
        health_module.check_replicas = original_check

    setup_module.build_engine = build_engine
    health_module.check_replicas = lambda engine: None
    return undo

"""Recorder of one rank's initial values, module outputs, gradients and losses over a few training steps.

Each rank writes one file, which contains only tensors and plain Python values. Outputs and gradients are recorded in
the first step only. Hooks take each gradient from autograd, before any reduction over replicas.
"""

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

MOST_BYTES = 2**31  # a rank stops recording outputs when they exceed this many bytes


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (global name, module) of each layer on this rank.

    The layers of a model without a `named_layers` method are its children.
    """
    named: Any = getattr(model, "named_layers", None)
    if named is not None:
        return list(named())
    tied = getattr(model, "tied_modules", nn.ModuleDict())
    found = [(f"tied_modules.{key}", module) for key, module in tied.items()]
    for name, module in model.named_children():
        if module is not tied:
            found.append((name, module))
    return found


def _modules(layers: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for layer_name, layer in layers:
        for name, module in layer.named_modules():
            yield f"{layer_name}.{name}" if name else layer_name, module


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, in order."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _tensors(value)


class Recorder:
    """Recorder of the training on this rank. After `steps` steps, it writes `folder/rank<r>.pt`.

    every: whether to record the outputs of all micro-batches instead of only the first one.
    """

    def __init__(self, folder: Path, steps: int, every: bool) -> None:
        self.folder = folder
        self.steps = steps
        self.every = every
        self.losses: list[float] = []
        self.outputs: list[dict[str, Any]] = []
        self.gradients: dict[str, Tensor] = {}
        self._at: tuple[int, int] | None = None  # (micro-batch, chunk) during a recorded forward pass
        self._calls: Counter[Any] = Counter()
        self._inside: list[str] = []  # names of the modules whose forward is running
        self._bytes = 0
        self._hooks = list[Any]()

    def attach(self, engine: Engine) -> Engine:
        """Attach the recorder to an engine, and return the engine."""
        self._engine = engine.deepspeed
        self._model = engine.deepspeed.module
        mesh = mpu.get_mesh()
        self.record: dict[str, Any] = {
            "rank": dist.get_rank(), "pipe": mesh.pipe.rank, "data": mesh.data.rank, "model": mesh.model.rank,
            "share": tuple(mesh.share), "context": mesh.context.size, "expert": mesh.expert.size,
            "layers": [], "kinds": {}, "specs": {}, "weights": {},
        }  # fmt: skip
        layers = named_layers(self._model)
        for name, _ in layers:
            self.record["layers"].append(name)
        for name, module in _modules(layers):
            self.record["kinds"][name] = type(module).__name__
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            self._hooks.append(module.register_forward_hook(partial(self._leave, name)))
        for name, parameter in global_parameters(self._model):
            self.record["specs"][name] = _plain(parameter)
            self.record["weights"][name] = zero_state.get_weight(parameter).detach().cpu().clone()
            if parameter.requires_grad:
                hook = parameter.register_hook(partial(self._add_gradient, name))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._initial_buffers = _buffers(self._model)
        self._listen(engine)
        self._original = engine.train_batch
        engine.train_batch = self._train_batch  # type: ignore[method-assign]
        return engine

    def _listen(self, engine: Any) -> None:
        """Replace the engine's forward pass by one that sets the current micro-batch, `self._at`.

        When a backward pass recomputes layers, `self._at` is None, so that no output is recorded twice.
        """
        if isinstance(engine, PipeEngine):
            ds = engine.deepspeed
            original_forward = ds._forward

            def forward(instruction: Any) -> None:
                self._pass(instruction.micro, instruction.chunk, lambda: original_forward(instruction))

            ds._forward = forward
            self.record["scale"] = ds.loss_factor
            return
        original_loss = engine.loss
        numbers = Counter[str]()

        def loss(model: Any, batch: Any) -> Tensor:
            numbers["seen"] += 1
            made: Tensor = self._pass(numbers["seen"] - 1, 0, lambda: original_loss(model, batch))
            return made

        engine.loss = loss
        self.record["scale"] = engine.factor(1)

    def _pass(self, micro: int, chunk: int, run: Callable[[], Any]) -> Any:
        """Run a forward pass, and record its outputs if they are wanted."""
        self._at = None
        recorded = self._model.training and not self.losses
        if recorded and (self.every or micro == 0):
            self._at = (micro, chunk)
        try:
            return run()
        finally:
            self._at = None

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._inside.append(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Record a module's outputs; called after its forward."""
        if self._inside:
            self._inside.pop()
        if self._at is None or self._bytes > MOST_BYTES:
            return
        micro, chunk = self._at
        call = self._calls[micro, chunk, name]
        self._calls[micro, chunk, name] += 1
        for number, each in enumerate(_tensors(outputs)):
            value = each.detach().cpu().clone()
            self._bytes += value.nbytes
            self.outputs.append(
                {"micro": micro, "chunk": chunk, "name": name, "call": call, "number": number, "value": value}
            )

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        if not self.losses:
            value = gradient.detach().double().cpu()
            self.gradients[name] = self.gradients[name] + value if name in self.gradients else value.clone()

    def _train_batch(self, batches: Batches | None, lr: float, gas: int | None = None) -> StepResult:
        """Run a training step and record its loss; write everything after the last step."""
        try:
            step = self._original(batches, lr, gas)
        except Exception:
            if self._inside:
                write_text(self.folder / f"stopped{dist.get_rank()}", self._inside[-1])
            raise
        self.losses.append(float(step.loss))
        if len(self.losses) == self.steps:
            self._write()
        return step

    def _write(self) -> None:
        """Write the record of this rank."""
        for hook in self._hooks:
            hook.remove()
        buffers = _buffers(self._model)
        changed = []
        for name, value in buffers.items():
            if not torch.equal(value, self._initial_buffers[name]):
                changed.append(name)
        zero_state.complete_weights(self._engine)
        trained = {}
        for name, parameter in global_parameters(self._model):
            trained[name] = int(fingerprint(zero_state.get_weight(parameter)))
        found = {**self.record, "losses": self.losses, "outputs": self.outputs, "gradients": self.gradients}
        found["trained"] = trained
        found |= {"buffers": buffers, "changed": changed, "cut_short": self._bytes > MOST_BYTES}
        torch.save(found, self.folder / f"rank{dist.get_rank()}.pt")


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().cpu().clone() for name, buffer in global_buffers(model)}


def _plain(parameter: nn.Parameter) -> dict[str, Any]:
    """Return how a parameter is sharded, as a dict of numbers and tuples."""
    spec = mpu.spec_of(parameter)
    return {
        "dim": spec.dim,
        "full": spec.full_shape,
        "local": spec.local_shape,
        "rows": tuple(spec.rows) if spec.local_shape else (0, 0, 1),
    }


def record_run(folder: Path, steps: int) -> Callable[[], None]:
    """Record all runs that start in this process from now on into `folder`. Return a function that ends the recording.

    Recording replaces `megatron.training.setup.build_engine`, which a run calls once to get its engine. Recorded runs
    do not compare the copies of weights: unequal copies are found in the records, with the layer that causes them.
    """
    home: Any = setup
    original = home.build_engine
    hooks: Any = health
    check = hooks.check_replicas

    def build(*args: Any) -> Engine:
        return Recorder(folder, steps, every=dist.get_world_size() == 1).attach(original(*args))

    def undo() -> None:
        home.build_engine = original
        hooks.check_replicas = check

    home.build_engine = build
    hooks.check_replicas = lambda engine: None
    return undo

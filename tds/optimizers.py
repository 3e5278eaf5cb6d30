"""torch optimizers: those named in a ds_config, clipping and skipping inside their kernels, and their step counts.

On a CPU, torch's optimizers replace DeepSpeed's, which must be compiled.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._deepspeed import DeepSpeedEngine, on_cpu
from .clip import clip, trainable_weights, weights_of

ADAMS = ("adam", "adamw", "muon")  # Muon contains an Adam for parameters that are not matrices
NOT_ON_CPUS = ("lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam")
# Options of DeepSpeed's Adam that torch's lacks; the last two are about memory.
KERNEL_OPTIONS = ("bias_correction", "set_grad_none", "fp32_optimizer_states")

# These optimizers count steps per tensor or not at all.
SEPARATE_STEPPERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


@contextlib.contextmanager
def use_torch_on_cpu() -> Iterator[list[str]]:
    """Make engines build optimizers that need no compiler on a CPU, and yield a list of notes for the user.

    Raises ValueError for an optimizer or a setting that only DeepSpeed's GPU kernels support.
    """
    original = DeepSpeedEngine._configure_basic_optimizer
    notes = list[str]()

    def configure(engine: Any, parameters: Any) -> Any:
        name = str(engine.optimizer_name())
        settings = engine.optimizer_params() or {}
        if name.lower() in ADAMS and not settings.get("torch_adam"):
            engine._config.optimizer_params = _torch_settings(name, settings)
            engine._config.zero_force_ds_cpu_optimizer = False
            notes.append(
                f"optimizer {name}: using torch's fused Adam, because DeepSpeed's must be compiled for this CPU"
            )
        elif name.lower() in NOT_ON_CPUS:
            raise ValueError(
                f"the optimizer {name} of the ds_config runs on GPUs only; on a CPU use Adam, AdamW or Adagrad"
            )
        return original(engine, parameters)

    if on_cpu():
        DeepSpeedEngine._configure_basic_optimizer = configure
    try:
        yield notes
    finally:
        DeepSpeedEngine._configure_basic_optimizer = original


def refuse_foreign(module: nn.Module, optimizer: Any) -> None:
    """Raise ValueError if `optimizer` steps weights, but none of `module`, for example those of an earlier copy.

    A stage without trainable weights may have an optimizer of any weights.
    """
    if optimizer is None:  # the ds_config names one
        return
    stepped = set(weights_of(optimizer))
    if stepped and trainable_weights(module) and stepped.isdisjoint(module.parameters()):
        raise ValueError(
            "the optimizer steps no weight of the model, so the model would not learn: create it from "
            "model.parameters() of the model that tds.initialize() gets"
        )


def refuse_closures(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose `step` needs a closure, such as LBFGS, as engines call it without one.

    optimizer: None, a torch optimizer, or a wrapper with such an optimizer in its attribute `optimizer`.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        return
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:  # a parameter without a default
        raise ValueError(
            f"{type(inner).__name__} evaluates the loss several times in a step (step(closure)), but an engine "
            "computes the gradients before the step: use an optimizer without a closure, such as torch.optim.AdamW"
        )


def _torch_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Translate settings of DeepSpeed's Adam to torch's Adam; the default weight decay stays 0, as in DeepSpeed."""
    if not settings.get("bias_correction", True):
        raise ValueError(f'optimizer {name}: "bias_correction": false is for GPUs only; leave it out on a CPU')
    torch_settings = {**settings, "torch_adam": True}
    for key in KERNEL_OPTIONS:
        torch_settings.pop(key, None)
    # With the flag torch_adam, DeepSpeed builds torch's Adam instead of its own, which in Muon steps the parameters
    # that are not matrices. torch's AdamW would decay weights by default. `fused` selects torch's fused kernel, which
    # also clips, see `clip_in_step`.
    if name.lower() == "muon":
        return torch_settings  # Muon is not fused and has its own weight decay
    return {"weight_decay": 0.0, **torch_settings, "fused": True}


def clip_in_step(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Clip `gradients` to the global norm `limit` (0: no clipping) before or in the next `optimizer.step()`.

    A fused optimizer divides them in its kernel, which saves a pass over all gradients. Its divisor is in fp32, so
    gradients in fp64 are clipped here. If `norm`, the current global norm, is not finite, the step is a no-op.
    """
    skip_unless_finite(optimizer, norm)
    has_fp64 = any(g.dtype is torch.float64 for g in gradients)
    clips_in_kernel = limit > 0 and is_fused(optimizer) and not has_fp64
    divisor = None
    if clips_in_kernel:
        # As in torch's clip_grad_norm_: 1e-6 avoids a division by 0, and gradients of a small norm stay as they are.
        divisor = ((norm + 1e-6) / limit).clamp(min=1.0).float()
    else:
        clip(gradients, norm, limit)
    # torch's fused kernels divide the gradients by this attribute, unless it is None.
    optimizer.grad_scale = divisor  # type: ignore[attr-defined]


def skip_unless_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Make the next `optimizer.step()` a no-op, moments and step counts included, if `norm`, a scalar, is not finite.

    torch's fused Adam reads a flag on the device. For any other optimizer, the host reads the norm, which
    synchronizes with the device in every step. These other optimizers include apex's Adam and torch's fused SGD. The
    kernel of fused SGD would leave the momentum uninitialised if it skipped the first step.
    """
    if is_fused(optimizer) and not isinstance(optimizer, torch.optim.SGD):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    elif not norm.isfinite():
        skip_step(optimizer)


def skip_step(optimizer: torch.optim.Optimizer) -> None:
    """Make the next `optimizer.step()` a no-op, which runs no hooks either.

    Dropping the gradients would not suffice: apex's Adam counts a step without gradients, and DeepSpeed's Muon steps
    the weights.
    """
    attributes = vars(optimizer)
    own_step = attributes.get("step")  # replaces the method of the class, for example by a torch LRScheduler

    def skip(*_: Any, **__: Any) -> None:  # also ends its own replacement, so the call after it steps again
        attributes.pop("step", None)
        if own_step is not None:
            attributes["step"] = own_step

    attributes["step"] = skip


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one of torch's fused kernels, which read the attribute `grad_scale`, steps all weights.

    An optimizer that calls a fused optimizer, such as Muon, has groups that are fused, but its attributes are not read.
    """
    return isinstance(optimizer, SEPARATE_STEPPERS) and all(group.get("fused") for group in optimizer.param_groups)


def torch_optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer of a DeepSpeed engine, which a wrapper may contain."""
    inner: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return inner


def adam_of(wrapped: torch.optim.Optimizer) -> Any:
    """Return the Adam inside Muon, or None if Muon has none; return any other optimizer itself."""
    return getattr(wrapped, "adamw", wrapped)


def steps_separately(wrapped: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer counts steps per weight or not at all, so that some weights can be stepped first."""
    inner = adam_of(wrapped)  # Muon itself counts no steps
    return inner is None or type(inner) in SEPARATE_STEPPERS or getattr(inner, "steps_separately", False)

"""Optimizers named in a ds_config: on a CPU, torch's optimizers replace DeepSpeed's, which must be compiled."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from ._deepspeed import DeepSpeedEngine, on_cpu

ADAMS = ("adam", "adamw", "muon")  # Muon contains an Adam for parameters that are not matrices
NOT_ON_CPUS = ("lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam")
OF_THE_KERNELS = ("set_grad_none", "fp32_optimizer_states")  # DeepSpeed's memory options, which torch's Adam lacks


@contextlib.contextmanager
def for_this_device() -> Iterator[list[str]]:
    """Make engines build optimizers that need no compiler on a CPU, and yield a list of notes for the user.

    Raises ValueError for an optimizer or a setting that only DeepSpeed's GPU kernels support.
    """
    before = DeepSpeedEngine._configure_basic_optimizer
    notes = list[str]()

    def configure(engine: Any, parameters: Any) -> Any:
        name = str(engine.optimizer_name())
        settings = dict(engine.optimizer_params() or {})
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
        return before(engine, parameters)

    if on_cpu():
        DeepSpeedEngine._configure_basic_optimizer = configure
    try:
        yield notes
    finally:
        DeepSpeedEngine._configure_basic_optimizer = before


def refuse_closures(optimizer: Any) -> None:
    """Raise ValueError for an optimizer whose `step` needs a closure, such as LBFGS, as engines call it without one.

    optimizer: None, a torch optimizer, a wrapper with such an optimizer in its attribute `optimizer`, or a function.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        return
    needed = [name for name, each in inspect.signature(inner.step).parameters.items() if each.default is each.empty]
    if "closure" in needed:
        raise ValueError(
            f"{type(inner).__name__} evaluates the loss several times in a step (step(closure)), but an engine "
            "computes the gradients before the step: use an optimizer without a closure, such as torch.optim.AdamW"
        )


def _torch_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Translate settings of DeepSpeed's Adam to torch's Adam; the default weight decay stays 0, as in DeepSpeed."""
    if not settings.get("bias_correction", True):
        raise ValueError(f'optimizer {name}: "bias_correction": false is for GPUs only; leave it out on a CPU')
    kept = {key: value for key, value in settings.items() if key not in ("bias_correction", *OF_THE_KERNELS)}
    if name.lower() == "muon":
        return {**kept, "torch_adam": True}
    return {"weight_decay": 0.0, **kept, "torch_adam": True, "fused": True}

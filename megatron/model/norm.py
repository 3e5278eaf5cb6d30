"""Norms before every sub-layer and after every stack.

Shapes: h hidden.
"""

from typing import Any

from torch import nn

from megatron import mpu
from megatron.config import ModelConfig
from megatron.kernels import apex_class


def build_head_norm(config: ModelConfig) -> nn.Module:
    """Build an RMS norm over the features of one head, with one weight for all heads, replicated on every rank.

    Its gradients are summed over the model-parallel ranks, which hold different heads.
    """
    return _build(config, config.head_size, rms=True, sequence=mpu.get_mesh().model)


def build_norm(config: ModelConfig) -> nn.Module:
    """Build LayerNorm (Ba et al. 2016), or RMSNorm without mean and bias (Zhang and Sennrich 2019), over h.

    Every rank holds a copy of the norm's weights.
    """
    return _build(config, config.hidden_size, rms=config.normalization == "rmsnorm", sequence=mpu.sequence_axis())


def _build(config: ModelConfig, size: int, rms: bool, sequence: mpu.Axis) -> nn.Module:
    kind = apex_class(config.kernels, "normalization", "FusedRMSNorm" if rms else "FusedLayerNorm")  # or None
    if rms and "rms-norm" in config.reference_ops:
        kind = nn.RMSNorm
    elif kind is None and rms:
        from .rms_norm import RMSNorm

        kind = RMSNorm
    elif kind is None:
        return mpu.LayerNorm(size, eps=config.layernorm_epsilon)  # it declares its weights
    norm: Any = kind(size, eps=config.layernorm_epsilon)
    mpu.declare(norm.weight, mpu.ones, sequence=sequence)
    if not rms:
        mpu.declare(norm.bias, sequence=sequence)
    return norm  # type: ignore[no-any-return]

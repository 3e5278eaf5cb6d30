"""The norm before every sub-layer and after every stack.

Shapes: h hidden.
"""

from torch import nn

from megatron import mpu
from megatron.config import ModelConfig


def build_norm(config: ModelConfig) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (Ba et al. 2016), or RMSNorm without mean and bias (Zhang and Sennrich 2019), over h; a copy on every rank."""
    if config.normalization == "rmsnorm":
        rms = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        mpu.shared_along_sequence(mpu.declare(rms.weight, init_std=None))
        return rms
    norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
    mpu.shared_along_sequence(mpu.declare(norm.weight, init_std=None))
    mpu.shared_along_sequence(mpu.declare(norm.bias))
    return norm

"""Old name of `megatron.mpu.megatron_compat`; the next minor version drops it."""

import warnings

from .megatron_compat import *  # noqa: F403

warnings.warn("megatron.mpu.original is now megatron.mpu.megatron_compat", DeprecationWarning, stacklevel=2)

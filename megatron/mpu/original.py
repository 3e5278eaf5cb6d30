"""Old name of `megatron.mpu.megatron_compat`; it goes in the next minor version."""

import warnings

from .megatron_compat import *  # noqa: F403

warnings.warn("megatron.mpu.original is now megatron.mpu.megatron_compat", DeprecationWarning, stacklevel=2)

"""Sharding of each layer over the replicas as soon as it is built, so no rank holds the whole model.

This is ZeRO-3 (Rajbhandari et al. 2020).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import _deepspeed
from .layout import make_rows_contiguous


def zero3_partitioner(config: Mapping[str, Any], mpu: Any, dtype: torch.dtype) -> Callable[[nn.Module], None] | None:
    """Return a callable that ZeRO-3-partitions an initialised layer; None if DeepSpeed partitions the whole model.

    Call it after a layer is initialised. `with deepspeed.zero.Init()` would initialise the layer in half precision, so
    its initial weights would differ from those of a run without ZeRO.
    config, mpu: arguments of `deepspeed.initialize`. dtype: dtype of the forward pass.
    """
    zero = config.get("zero_optimization", {})
    # On nvme, each zero.Init would create buffers of its own for reading and writing weights.
    offloaded = (zero.get("offload_param") or {}).get("device")
    if zero.get("stage") != 3 or mpu.get_data_parallel_world_size() == 1 or offloaded == "nvme":
        return None
    # With these settings, DeepSpeed must partition the whole model at once, when it builds its engine. For example,
    # each zero.Init would create the process groups of zero_hpz_partition_size, and DeepSpeed refuses to create them
    # twice.
    has_secondary_partition = (zero.get("zero_hpz_partition_size") or 1) != 1  # 1 is off
    if has_secondary_partition or zero.get("zero_quantized_weights") or zero.get("zero_quantized_nontrainable_weights"):
        return None
    _deepspeed.patch_deepspeed()

    def partition(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):  # not partitioned before
                parameter.data = parameter.data.to(dtype)
        make_rows_contiguous(layer)  # zero.Init broadcasts the bytes of each weight
        _deepspeed.deepspeed.zero.Init(
            module=layer,
            data_parallel_group=mpu.get_data_parallel_group(),
            dtype=dtype,
            config_dict_or_path=dict(config),
            mpu=mpu,
        )
        layer.to(_deepspeed.this_device())  # moves its buffers

    return partition

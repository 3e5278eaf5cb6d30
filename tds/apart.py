"""A model that no rank ever holds whole: each layer is cut over the replicas as soon as it is built (ZeRO-3, Rajbhandari et al. 2020)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import _deepspeed

# Where a ds_config asks for one of these, DeepSpeed makes groups, quantizers or files for the whole model, when its engine is made.
_OF_THE_WHOLE = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights")


def taken_apart(config: Mapping[str, Any], mpu: Any, dtype: torch.dtype) -> Callable[[nn.Module], None] | None:
    """What takes a layer apart that has its first values; None where the engine is to do it with the whole model.

    As `deepspeed.zero.Init`, which would also draw the values in half precision, and so draw others than without ZeRO.
    config, mpu: as `deepspeed.initialize` takes them. dtype: of the forward pass.
    """
    zero = config.get("zero_optimization", {})
    offloaded = (zero.get("offload_param") or {}).get("device")
    if zero.get("stage") != 3 or mpu.get_data_parallel_world_size() == 1 or offloaded == "nvme":
        return None
    if any(zero.get(key) not in (None, False, 1) for key in _OF_THE_WHOLE):
        return None
    _deepspeed.prepare()

    def take_apart(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
                parameter.data = parameter.data.to(dtype)
        with _deepspeed.quietly():
            _deepspeed.deepspeed.zero.Init(
                module=layer,
                data_parallel_group=mpu.get_data_parallel_group(),
                dtype=dtype,
                config_dict_or_path=dict(config),
                mpu=mpu,
            )
        layer.to(_deepspeed.this_device())  # its buffers

    return take_apart

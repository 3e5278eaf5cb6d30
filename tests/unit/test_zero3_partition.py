"""Some settings of ZeRO 3 leave the partitioning of a model to DeepSpeed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tds.zero3_partition import zero3_partitioner


@pytest.mark.parametrize(
    ("settings", "by_layer"),
    [
        ({}, True),
        ({"zero_quantized_weights": False, "zero_hpz_partition_size": 1}, True),
        ({"zero_quantized_weights": True}, False),
        ({"zero_quantized_weights": 1}, False),
        ({"zero_quantized_nontrainable_weights": True}, False),
        ({"zero_hpz_partition_size": 2}, False),
        ({"offload_param": {"device": "nvme"}}, False),
    ],
)
def test_settings_for_the_whole_model_at_once(settings: dict[str, Any], by_layer: bool) -> None:
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    partition = zero3_partitioner({"zero_optimization": {"stage": 3, **settings}}, mpu, torch.float32)
    assert (partition is not None) is by_layer

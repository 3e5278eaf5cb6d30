"""Upcycling: a dense checkpoint becomes one with experts, all copies of its MLP (Komatsuzaki et al. 2022)."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron import mpu
from megatron.checkpointing import CheckpointReader, plain_config
from megatron.checkpointing.files import BUFFER, WEIGHT
from megatron.checkpointing.stream import LazyTensor
from megatron.config import Config
from megatron.config.command_line import with_values
from megatron.model.router import Router

MODEL_KEYS = (f"{WEIGHT}.", f"{BUFFER}.")  # prefixes of the model's tensors in a checkpoint; others are the optimizer's
MLP_KEY = re.compile(rf"{WEIGHT}\.((?:\w+\.)?layers\.(\d+)\.mlp)\.(.+)")


def router_buffers(router: str, experts: int) -> list[LazyTensor]:
    """Return the buffers of a new router: no tokens seen, and no bias. router: name of the router in the model."""
    zeros = partial(torch.zeros, experts, dtype=torch.int64)
    return [
        LazyTensor(f"{BUFFER}.{router}.{name}", (experts,), torch.int64, zeros) for name in ("tokens", "bias_steps")
    ]


def upcycled_config(
    reader: CheckpointReader, experts: int, per_token: int | None, frequency: Sequence[str] | None
) -> Config:
    """Return the settings of a checkpoint with `experts` experts. Raises ValueError if it has experts already.

    per_token: --experts-per-token, by default 2. frequency: --moe-layer-frequency, by default all layers.
    """
    dense = plain_config(reader)
    if dense.model.num_experts is not None:
        raise ValueError(f"{reader.path}: the model already has --num-experts {dense.model.num_experts}")
    values: dict[str, Any] = {
        "num_experts": experts,
        "experts_per_token": min(2, experts) if per_token is None else per_token,
        # The dense run may have used --compile or --precision fp8, which experts cannot be combined with.
        "compile": None,
        "precision": dense.train.dtype,
    }
    if frequency:
        values["moe_layer_frequency"] = tuple(frequency)
    return with_values(dense, values)


def upcycled_entries(reader: CheckpointReader, config: Config) -> Iterator[LazyTensor]:
    """Yield the tensors to write: weights and buffers of the dense checkpoint, copies of its MLPs, and new routers.

    A router has the initial weights that it would have in a new run with the same --seed.
    """
    experts = config.model.num_experts or 0
    for key, entry in reader.tensors.items():
        if not key.startswith(MODEL_KEYS):
            continue
        new_keys = [key]
        # weight.layers.3.mlp.dense_h_to_4h.weight has the parts layers.3.mlp, 3 and dense_h_to_4h.weight.
        mlp_match = MLP_KEY.fullmatch(key)
        if mlp_match and config.model.has_experts(int(mlp_match[2])):
            our_mlp = mlp_match[1]
            weight = mlp_match[3]
            new_keys = [f"{WEIGHT}.{our_mlp}.experts.{expert}.{weight}" for expert in range(experts)]
            # Every MLP has this weight once, so its router is written once.
            if weight == "dense_h_to_4h.weight":
                router = f"{our_mlp}.router"
                shape = (experts, config.model.hidden_size)
                yield LazyTensor(
                    f"{WEIGHT}.{router}.weight", shape, torch.float32, partial(_router_weight, config, router)
                )
                yield from router_buffers(router, experts)
        for new_key in new_keys:
            yield LazyTensor(new_key, tuple(entry["shape"]), reader.dtype(key), partial(reader.read_whole, key))


def _router_weight(config: Config, name: str) -> Tensor:
    weight = Router(config.model, name).weight
    mpu.spec_of(weight).fill(weight, mpu.derive_seed(config.train.seed, "weights", f"{name}.weight"))
    return weight.detach()

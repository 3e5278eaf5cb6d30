"""--compile: the transformer layers through `torch.compile`, one by one, so that equal layers are compiled once."""

import functools
from typing import Any

import torch

from .._torch import cpp_compiler_found
from ..config import Config
from ..model.attention import Attention
from ..model.block import TransformerLayer
from ..mpu import mappings
from ..ranks.rank_0 import print_rank_0


def compile_layers(model: Any, config: Config) -> None:
    """Let each transformer layer of this process be compiled at its first call.

    Sums over model-parallel ranks are part of it (`mpu/traced.py`), and dropout with its named streams (`mpu/dropout.py`). So are
    oneDNN's products (`mpu/linear.py`). Recomputation and, on accelerators, attention with dropout stay outside.
    Where no C++ compiler is found (a CPU needs one) a line says so and nothing changes.
    """
    if not config.train.compile:
        return
    if not compiler_found():
        print_rank_0("--compile does nothing: no C++ compiler was found (CXX names one)")
        return
    _keep_outside()
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.compile()


@functools.cache
def _keep_outside() -> None:
    """Mark what is not for the compiler; only now, since the marking loads torch's compiler, which takes seconds."""
    kept = [
        (Attention, "_with_dropout"),
        (Attention, "_computed_again"),
        (mappings, "over_ranks"),
        (mappings, "sum_in_place"),
    ]
    for owner, name in kept:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]


def compiler_found() -> bool:
    """Whether torch.compile can build code for the CPU; accelerators bring their own compiler."""
    from ..ranks.device import available

    if available():
        return True
    return cpp_compiler_found()

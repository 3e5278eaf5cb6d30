"""The flag --compile: compiles each transformer layer separately, so that identical layers are compiled only once."""

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
    """Let `torch.compile` compile each transformer layer of this process at its first call, if --compile is given.

    All-reduces over model-parallel ranks (`mpu/traced.py`), dropout with named random streams (`mpu/dropout.py`) and
    oneDNN matmuls (`mpu/linear.py`) are compiled, too. Recomputation is not compiled. Attention with dropout is not
    compiled on accelerators.
    On a CPU without a C++ compiler, the function prints a note and changes nothing.
    """
    if not config.train.compile:
        return
    if not compiler_found():
        print_rank_0("--compile has no effect: no C++ compiler was found; set the variable CXX to a C++ compiler")
        return
    _keep_outside()
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.compile()


@functools.cache
def _keep_outside() -> None:
    """Exclude the functions in `kept`, such as recomputation and eager collectives, from compilation.

    Call this function only with --compile, because importing PyTorch's compiler takes seconds.
    """
    kept = [
        (Attention, "_with_dropout"),
        (Attention, "_computed_again"),
        (mappings, "over_ranks"),
        (mappings, "sum_in_place"),
    ]
    for owner, name in kept:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]


def compiler_found() -> bool:
    """Return True if torch.compile finds a compiler; on a CPU it needs a C++ compiler."""
    from ..ranks.device import available

    if available():
        return True
    return cpp_compiler_found()

"""The flag --compile: compiles each transformer layer separately, so that identical layers are compiled only once."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from .. import mpu
from .._torch import can_use_triton, has_cpp_compiler
from ..config import Config
from ..config.conflicts import compile_conflicts
from ..model.attention import Attention
from ..model.layer_stack import transformer_layers
from ..mpu import mappings
from ..ranks import device
from ..ranks.objects import gather_objects
from ..ranks.rank_0 import print_rank_0
from ..training.feature import Feature, Plan

# What torch.compile lacks on this device, and what to do.
NO_CPP_COMPILER = "no C++ compiler was found; set the variable CXX to a C++ compiler"
NO_TRITON = (
    "Triton, a C compiler or the headers of Python were not found, or this device is older than Volta; install "
    "triton, gcc and python3-dev"
)


class Compilation(Feature):
    """Feature that compiles transformer layers, unless something speaks against it; see `reason_against`."""

    def model(self, model: nn.Module, plan: Plan) -> None:
        compile_layers(model, plan.config, plan.resolved.zero_stage)

    def engine(self, engine: Any, plan: Plan) -> None:
        accumulate_in_graph(engine.module)


def compile_layers(model: Any, config: Config, zero_stage: int = 0) -> None:
    """Let `torch.compile` compile each transformer layer of this process at its first call, see `reason_against`.

    All-reduces over model-parallel ranks (`mpu/traced.py`), dropout with named random streams (`mpu/dropout.py`) and
    oneDNN matmuls (`mpu/linear.py`) are compiled, too. Recomputation is not compiled. Attention with dropout is not
    compiled on accelerators.
    Without --compile and --no-compile, a line of the log says whether layers are compiled on CUDA.
    """
    layers = transformer_layers(model)
    # None without --compile and --no-compile: layers are compiled on CUDA, unless a reason speaks against it.
    requested = config.train.compile
    on_cuda = device.current_device().type == "cuda"
    is_enabled = on_cuda if requested is None else requested
    if not is_enabled:
        return
    # A node may lack a compiler. Then no rank compiles, as compiled layers round differently.
    reason = next(filter(None, gather_objects(reason_against(layers, config, zero_stage))), None)
    if not layers:
        return
    if reason is not None:
        outcome = "--compile has no effect" if requested else "note: layers are not compiled"
        print_rank_0(f"{outcome}: {reason}")
        return
    if requested is None:
        print_rank_0(
            "note: layers are compiled by torch.compile, so the first steps are slow; --no-compile turns it off"
        )
    _exclude_from_compiling()
    for layer in layers:
        layer.compile()


def accumulate_in_graph(model: Any) -> None:
    """Let compiled layers accumulate weight gradients as eager layers do. Call this after the optimizer is attached."""
    for module in model.modules():
        if isinstance(module, (mpu.ColumnParallelLinear, mpu.RowParallelLinear)):
            spec = mpu.spec_of(module.weight)
            # A look-up adds to the gradient of an embedding, so autograd must accumulate it.
            if spec.accumulate_wgrad is not None and not spec.used_as_embedding:
                from ..mpu.compiled_linear import weight_at

                module.options = replace(module.options, wgrad_in_graph=True)
                weight_at[module.weight.data_ptr()] = module.weight


def reason_against(layers: Sequence[nn.Module], config: Config, zero_stage: int) -> str | None:
    """Return why layers are not compiled, or None if they are.

    If --compile is given, the only reason is a missing compiler, since the settings have already refused conflicts.
    """
    if not compiler_found():
        return NO_TRITON if device.current_device().type == "cuda" else NO_CPP_COMPILER
    if config.train.compile:
        return None
    # The first of all reasons, if there is one.
    return next(chain(compile_conflicts(config, zero_stage), _drawbacks(layers, config)), None)


def _drawbacks(layers: Sequence[nn.Module], config: Config) -> Iterator[str]:
    """Yield what makes compiled layers slower or larger than eager ones on CUDA; --compile compiles them anyway."""
    model = config.model
    window = model.sliding_window
    # All objectives except lm, such as sft, separate the documents of a sample.
    has_documents = config.objective != "lm" or config.data.reset_attention_mask
    has_context_ranks = config.parallel.context_parallel_size > 1
    is_windowed = window is not None and window < config.data.seq_length
    needs_mask = has_documents or has_context_ranks or is_windowed
    # With relative positions, eager layers save a tensor of this size, too, so compiled layers need no more memory.
    if needs_mask and model.position_embedding != "relative":
        yield (
            "each would save its own attention mask, which eager layers share or do not need, because of documents, "
            "--sliding-window or --context-parallel-size; --compile compiles them anyway"
        )
    modules = chain.from_iterable(layer.modules() for layer in layers)
    if any(type(module).__module__.startswith("apex") for module in modules):
        yield "apex's norms cannot be compiled; --kernels torch avoids them"


@functools.cache
def _exclude_from_compiling() -> None:
    """Exclude the functions in `excluded`, such as recomputation and eager collectives, from compilation.

    The cache makes every further call a no-op, so that no function is wrapped twice.
    Call this function only if layers are compiled, because importing PyTorch's compiler takes seconds.
    """
    excluded = [
        (Attention, "_compute_with_dropout"),
        (Attention, "_compute_with_checkpoint"),
        (mappings, "apply_collective"),
        (mappings, "sum_in_place"),
    ]
    for owner, name in excluded:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]


def compiler_found() -> bool:
    """Return True if torch.compile finds what it needs: a C++ compiler on a CPU, Triton and a C compiler on CUDA."""
    kind = device.current_device().type
    if kind == "cpu":
        return has_cpp_compiler()
    # Nothing is required of other kinds of devices.
    return kind != "cuda" or can_use_triton()

"""Megatron-LM's mpu functions that tutorials and CPM-Pretrain call and our own layers do not need, on our grid.

Shapes: ... any leading dimensions, n last dimension.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from . import mesh as _mesh
from .data import default_device
from .parameters import declare, ones, zeros
from .random import RngStreams, checkpoint_with, derive_seed


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient. Raises ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{numerator} cannot be divided by {denominator} without a remainder")
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split [..., n] into `num_partitions` tensors [..., n/num_partitions]: views, or contiguous copies.

    Raises ValueError if they do not divide n.
    """
    chunks: tuple[Tensor, ...] = torch.split(tensor, divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm (Ba et al. 2016), with weights declared as replicated on the model-parallel ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for weight, init_method in ((self.weight, ones), (self.bias, zeros)):
            if weight is not None:
                declare(weight, init_method, sequence=_mesh.parallel_context().sequence)


def is_unitialized() -> bool:
    """Return whether `initialize_model_parallel` has not been called yet; the spelling is Megatron-LM's."""
    return not _mesh.is_initialized()


def set_model_parallel_rank(rank: int) -> None:
    """Do nothing if `rank` is this process's rank. Raises RuntimeError otherwise."""
    _same("set_model_parallel_rank", rank, _mesh.current().model.rank)


def set_model_parallel_world_size(world_size: int) -> None:
    """Do nothing if `world_size` is the actual size. Raises RuntimeError otherwise."""
    _same("set_model_parallel_world_size", world_size, _mesh.current().model.size)


def _same(name: str, wanted: int, there: int) -> None:
    if wanted != there:
        raise RuntimeError(
            f"mpu.{name}({wanted}): it is {there} in this run and cannot be set by hand; lay the ranks out with "
            f"mpu.initialize_model_parallel, or build a layer for another place with axis=mpu.Axis(None, ranks, rank)"
        )


class RngTracker:
    """Dropout streams of this rank under Megatron-LM's interface; its states are stored, ours are computed."""

    def fork(self, name: str = "model-parallel-rng") -> AbstractContextManager[None]:
        """Draw inside the block from a stream that differs on each model-parallel rank, as sharded layers need.

        Layers that use the same name draw from it in turn, so their masks depend on which of them are on this
        rank. With a name for each layer (`fork(f"layers.{i}.mlp")`) the masks are the same in all layouts.
        """
        here = _mesh.parallel_context()
        return here.rng.fork(name, default_device(here.mesh.replica), split=True)

    def get_states(self) -> Any:
        """Return the state of all streams, as DeepSpeed's activation checkpointing keeps it before a forward pass."""
        return _mesh.parallel_context().rng.get_state()

    def set_states(self, states: Any) -> None:
        """Continue from `states`, for the forward pass that DeepSpeed's activation checkpointing repeats."""
        _mesh.parallel_context().rng.set_state(states)

    def add(self, name: str, seed: int) -> None:
        """Raise RuntimeError: streams need no registration."""
        raise RuntimeError(
            f"get_cuda_rng_tracker().add({name!r}, {seed}): a stream is there when fork({name!r}) first asks for it, "
            f"and begins where --seed and the iteration put it; leave the call out"
        )


def get_cuda_rng_tracker() -> RngTracker:
    """Return the random streams, under Megatron-LM's name."""
    return RngTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Reseed torch's generators, alike on all ranks, and the dropout streams, which differ by rank."""
    rng = _mesh.parallel_context().rng
    rng.seed = derive_seed(seed, "dropout")
    rng.begin(rng.iteration)
    torch.manual_seed(seed)  # after `begin`, which seeds torch's generators by iteration


def checkpoint(function: Callable[..., Any], *args: Any, rng: RngStreams | None = None) -> Any:
    """Run `function(*args)` keeping only its inputs; recompute it in the backward pass.

    The recomputation repeats all random draws: those from streams and, as by nn.Dropout, from torch's
    generators.
    rng: the streams; by default this rank's.
    """
    return checkpoint_with(rng or _mesh.parallel_context().rng, function, *args, torchs_own=True)

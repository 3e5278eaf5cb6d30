"""Functions of Megatron-LM's mpu that tutorials and CPM-Pretrain call but this package's own layers do not need.

Shapes: ... any leading dimensions, n last dimension.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..seeds import derive_seed
from .current import current_mesh, model_parallel_is_initialized, parallel_context
from .data import default_device
from .random import RngStreams


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient. Raises ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{numerator} cannot be divided by {denominator} without a remainder")
    return numerator // denominator


def check_strides(stride: int, keep_master_weight_for_test: bool) -> None:
    """Raise ValueError for values of Megatron-LM's arguments that the layers of this package do not support."""
    if stride != 1:
        raise ValueError(
            f"stride={stride} is not supported, because each rank holds contiguous rows of the weight; leave stride at "
            f"1, and order the rows by head (query, key and value of head 0, then query, key and value of head 1, ...)"
        )
    if keep_master_weight_for_test:
        raise ValueError(
            "keep_master_weight_for_test=True is not supported, because no rank holds the whole weight; leave it out"
        )


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split [..., n] into `num_partitions` tensors [..., n/num_partitions]: views, or contiguous copies.

    Raises ValueError if num_partitions does not divide n.
    """
    size = divide(tensor.shape[-1], num_partitions)
    chunks: tuple[Tensor, ...] = torch.split(tensor, size, dim=-1)
    if not contiguous_split_chunks:
        return chunks
    return tuple(chunk.contiguous() for chunk in chunks)


def is_unitialized() -> bool:
    """Return whether `initialize_model_parallel` has not been called yet; the spelling is Megatron-LM's."""
    return not model_parallel_is_initialized()


def set_model_parallel_rank(rank: int) -> None:
    """Do nothing if `rank` is this process's model-parallel rank. Raises RuntimeError otherwise."""
    _check_unchanged("set_model_parallel_rank", rank, current_mesh().model.rank)


def set_model_parallel_world_size(world_size: int) -> None:
    """Do nothing if `world_size` is the number of model-parallel ranks. Raises RuntimeError otherwise."""
    _check_unchanged("set_model_parallel_world_size", world_size, current_mesh().model.size)


def _check_unchanged(name: str, wanted: int, actual: int) -> None:
    """Raise RuntimeError unless the value that a script sets is the value of this run."""
    if wanted != actual:
        raise RuntimeError(
            f"mpu.{name}({wanted}): the value is {actual} in this run and cannot be set by hand; lay the ranks out "
            f"with mpu.initialize_model_parallel, or build a layer for another rank with "
            f"axis=mpu.Axis(None, ranks, rank)"
        )


class RngTracker:
    """Dropout streams of this rank, with the interface of Megatron-LM's `CudaRNGStatesTracker`.

    Megatron-LM stores generator states. These streams instead compute each draw from seed, iteration and a counter.
    """

    def fork(self, name: str | None = None) -> AbstractContextManager[None]:
        """Make torch draw from stream `name` inside the block; the stream differs on each model-parallel rank.

        Layers that use the same name draw from one stream in turn, so their masks depend on which of these layers
        are on this rank. With a name for each layer (`fork(f"layers.{i}.mlp")`), masks do not depend on the stages.
        Without a name, each pipeline stage has a stream of its own, as in Megatron-LM.
        """
        context = parallel_context()
        if name is None:
            name = f"model-parallel-rng.{context.mesh.pipe.rank}"
        return context.rng.fork(name, default_device(context.mesh.replica), split=True)

    def get_states(self) -> Any:
        """Return the state of all streams, which DeepSpeed's activation checkpointing saves before a forward pass."""
        return parallel_context().rng.get_state()

    def set_states(self, states: Any) -> None:
        """Continue from `states`, as DeepSpeed's activation checkpointing does before it repeats a forward pass."""
        parallel_context().rng.set_state(states)

    def add(self, name: str, seed: int) -> None:
        """Raise RuntimeError: streams need no registration."""
        raise RuntimeError(
            f"get_cuda_rng_tracker().add({name!r}, {seed}) is not supported: fork({name!r}) creates the stream on "
            f"first use and seeds it from --seed and the iteration; leave the call out"
        )


def get_cuda_rng_tracker() -> RngTracker:
    """Return the dropout streams of this rank; the name is Megatron-LM's."""
    return RngTracker()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators with `seed`, and this rank's dropout streams with a seed derived from `seed`."""
    rng = parallel_context().rng
    rng.seed = derive_seed(seed, "dropout")
    rng.begin(rng.iteration)
    torch.manual_seed(seed)  # This call comes last, because `begin` also seeds torch's generators.


def checkpoint(function: Callable[..., Any], *args: Any, rng: RngStreams | None = None) -> Any:
    """Run `function(*args)`, saving only its inputs, and run it again in the backward pass.

    The recomputation repeats all random draws, both from streams and from torch's generators, as in nn.Dropout (Chen et
    al. 2016, with the replay of Megatron-LM). torch's non-reentrant checkpoint is used, so inputs need not require
    gradients. rng: the dropout streams; by default this rank's.
    """
    rng_streams = rng or parallel_context().rng
    contexts = rng_streams.contexts
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

"""Check that copies of weights are equal on all ranks that hold them, at every save."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tds.optimizer_state import local_shard, wait_for_weights
from tds.pipe import tied_weights

from .. import mpu
from ..model.layers import global_parameters
from .agreement import describe_ranks, split_by_majority
from .errors import RunError
from .objects import gather_objects

CHUNK_ELEMENTS = 1 << 20  # elements hashed at a time
# Bytes of an element -> dtype that reads its bits; 8 bytes are read as two numbers.
INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprint(x: Tensor) -> Tensor:
    """Return a hash of the bits of `x`, an int64 scalar on the device of `x`.

    The hash is the sum of all elements of `x`, read as integers, times odd numbers that depend on the element's
    position, modulo 2^64. Flipping any single bit of `x` changes the hash, because an odd number times a power of two
    is never 0 modulo 2^64.
    """
    ints = x.detach().contiguous().view(-1).view(INT_DTYPES[x.itemsize])
    num_factors = min(CHUNK_ELEMENTS, ints.numel())
    odd_factors = 2 * torch.arange(num_factors, device=x.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for chunk in torch.split(ints, CHUNK_ELEMENTS):
        products = chunk.to(torch.int64) * odd_factors[: chunk.numel()]
        # An odd constant (Knuth's MMIX generator) makes the hash depend on the order of chunks; int64 wraps at 2^64.
        total = total * 0x5851F42D4C957F2D + products.sum()
    return total


def check_replicas(engine: Any) -> None:
    """Raise RunError on all ranks if copies of a weight differ by a bit; the message names the weight and its ranks.

    All ranks must call this. Copies are weights that several ranks hold: all weights on data-parallel ranks (except
    with ZeRO 3, which shards them), unsplit weights on model-parallel ranks, and tied weights on pipeline stages.
    engine: DeepSpeed's engine, or the pipeline engine of `tds`.
    """
    if dist.get_world_size() == 1:
        return
    wait_for_weights(engine)
    mesh = mpu.get_mesh()
    model = engine.module
    fingerprints = _fingerprints(model, engine.device)
    # Expert-parallel ranks hold different experts, so only some of the data-parallel ranks hold copies of an expert.
    expert_names = {name for name, p in global_parameters(model) if mpu.replicas_of(p) is not mesh.data}
    expert_weights = {}
    other_weights = {}
    unsplit_weights = {}
    for key, value in fingerprints.items():
        if key.name in expert_names:
            expert_weights[key] = value
        else:
            other_weights[key] = value
        if key.model_rank is None:
            unsplit_weights[key] = value
    # ZeRO 3 shards weights over the data-parallel ranks, which thus hold no copies.
    is_zero_3 = any(key.data_rank is not None for key in fingerprints)
    all_equal = is_zero_3 or _equal_on_ranks(other_weights, mesh.data)
    # The collective comes before `and`, so that all ranks run it, whatever they have found so far.
    all_equal = _equal_on_ranks(expert_weights, mesh.expert_replicas) and all_equal
    all_equal = _equal_on_ranks(unsplit_weights, mesh.model) and all_equal
    tied = _tied_fingerprints(model, fingerprints)
    all_equal = _ties_are_equal(tied) and all_equal
    # Only some ranks may have seen the difference, but all of them must raise the error.
    if not all(gather_objects(all_equal)):
        raise RunError(_describe_difference(fingerprints, tied))


class WeightKey(NamedTuple):
    """Weight, or part of a weight, that a rank holds.

    name: global name. model_rank: None if the weight is not split. data_rank: None if ZeRO 3 does not shard it.
    """

    name: str
    model_rank: int | None
    data_rank: int | None


def _fingerprints(model: nn.Module, device: torch.device) -> dict[WeightKey, int]:
    """Return the fingerprint of every weight of this rank. All fingerprints come to the host in one transfer."""
    mesh = mpu.get_mesh()
    fingerprints = {}
    for name, p in global_parameters(model):
        own_part = local_shard(p)  # `p` itself, unless ZeRO 3 shards it
        model_rank = mesh.model.rank if mpu.is_split(p) else None
        data_rank = None if own_part is p else mesh.data.rank
        fingerprints[WeightKey(name, model_rank, data_rank)] = fingerprint(own_part).to(device)
    if not fingerprints:
        return {}
    numbers = torch.stack(list(fingerprints.values())).tolist()
    return dict(zip(fingerprints, numbers, strict=True))


def _tied_fingerprints(model: nn.Module, fingerprints: Mapping[WeightKey, int]) -> dict[str, int]:
    """Return global name -> fingerprint of the weights of this stage that other stages have, too."""
    tied = set(map(id, tied_weights(model)))
    names = {name for name, p in global_parameters(model) if id(p) in tied}
    return {key.name: value for key, value in fingerprints.items() if key.name in names}


def _ties_are_equal(tied: Mapping[str, int]) -> bool:
    """Return whether all stages have the same fingerprint of each tied weight."""
    pairs = set[tuple[str, int]]()  # of name and fingerprint, of all stages
    for stage in gather_objects(tied, mpu.get_mesh().pipe):
        pairs.update(stage.items())
    return len(pairs) == len(dict(pairs))  # else a name is in several pairs, of which dict() keeps one


def _equal_on_ranks(values: Mapping[WeightKey, int], axis: mpu.Axis) -> bool:
    """Return whether `values` are the same on all ranks of `axis`, by a hash of 63 bits."""
    text = repr(sorted(values.items(), key=str))
    hashes = gather_objects(mpu.derive_seed(text), axis)
    return len(set(hashes)) == 1


def _describe_difference(fingerprints: Mapping[WeightKey, int], tied: Mapping[str, int]) -> str:
    """Describe the first weight whose copies differ, and the ranks whose copy differs from the most frequent copy."""
    stage = mpu.get_mesh().pipe.rank
    own_values = {}
    for key, value in fingerprints.items():
        # Weights of one name on several stages are copies only if they are tied. Other such weights, outside the layers
        # of a PipelineModule, are trained by each stage alone, so the stage is a part of what identifies them.
        held_stage = None if key.name in tied else stage
        own_values[(key, held_stage)] = value
    values_by_rank = gather_objects(own_values)
    weights = dict.fromkeys(chain(*values_by_rank))  # an ordered set of the pairs (key, stage) of all ranks
    for weight in weights:
        value_by_rank = {}
        for rank, held in enumerate(values_by_rank):
            if weight in held:
                value_by_rank[rank] = held[weight]
        _, first_rank, other_ranks = split_by_majority(value_by_rank)  # others than the most frequent value
        if other_ranks:
            return (
                f"the weight {weight[0].name} on {describe_ranks(other_ranks)} differs from its copy on rank "
                f"{first_rank}, although copies must be equal: a layer skips a reduction or draws other random numbers "
                "on some ranks, or the hardware is faulty; nothing was saved or deleted. If the weight is split over "
                "tensor-parallel ranks, call mpu.declare(weight, init, dim=0) where it is made"
            )
    return "copies of weights differed between ranks, but were equal when compared again: the hardware is faulty"

"""Check that copies of weights are equal on all ranks that hold them, at every save."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tds.optimizer_state import complete_weights, local_piece
from tds.pipe import tied_weights

from .. import mpu
from ..model.layers import global_parameters
from .agreement import name_ranks, split_usual
from .errors import RunError
from .objects import gather_objects

AT_ONCE = 1 << 20  # elements hashed at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # bytes of an element -> dtype to read it as


def fingerprint(x: Tensor) -> Tensor:
    """Return a hash of the bits of `x`, an int64 scalar on the device of `x`.

    The hash is the sum of all elements of `x`, read as integers, times odd numbers that depend on the element's
    position, modulo 2^64. Flipping any single bit of `x` changes the hash, because an odd number times a power of two
    is never 0 modulo 2^64.
    """
    bits = x.detach().contiguous().view(-1).view(INTEGERS[x.itemsize])
    odd = 2 * torch.arange(min(AT_ONCE, bits.numel()), device=x.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in torch.split(bits, AT_ONCE):
        total = total * 0x5851F42D4C957F2D + (part.to(torch.int64) * odd[: part.numel()]).sum()
    return total


def check_replicas(engine: Any) -> None:
    """Raise RunError on all ranks if copies of a weight differ by a bit; the message names the weight and its ranks.

    All ranks must call this. Copies are weights that several ranks hold: all weights on data-parallel ranks (except
    with ZeRO 3, which shards them), unsplit weights on model-parallel ranks, and tied weights on pipeline stages.
    engine: DeepSpeed's engine, or the pipeline engine of `tds`.
    """
    if dist.get_world_size() == 1:
        return
    complete_weights(engine)
    mesh = mpu.get_mesh()
    model = engine.module
    device = engine.device
    mine = _fingerprints(model, device)
    experts = {name for name, p in global_parameters(model) if mpu.replicas_of(p) is not mesh.data}
    of_experts = {key: value for key, value in mine.items() if key.name in experts}
    others = {key: value for key, value in mine.items() if key.name not in experts}
    copies = {key: value for key, value in mine.items() if key.model_rank is None}
    sharded = any(key.data_rank is not None for key in mine)
    same = sharded or _alike(others, mesh.data, device)
    same = _alike(of_experts, mesh.expert_replicas, device) and same
    same = _alike(copies, mesh.model, device) and same
    ties = _ties(model, mine)
    same = _ties_agree(ties) and same
    bad = torch.tensor([float(not same)], device=device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad.item():
        raise RunError(_describe_difference(mine, ties))


class Key(NamedTuple):
    """Weight, or part of a weight, that a rank holds.

    name: global name. model_rank: None if the weight is not split. data_rank: None if ZeRO 3 does not shard it.
    """

    name: str
    model_rank: int | None
    data_rank: int | None


def _fingerprints(model: nn.Module, device: torch.device) -> dict[Key, int]:
    """Return the fingerprint of every weight of this rank. All fingerprints come to the host in one transfer."""
    mesh = mpu.get_mesh()
    found = {}
    for name, p in global_parameters(model):
        own = local_piece(p)
        model_rank = mesh.model.rank if mpu.is_split(p) else None
        data_rank = None if own is p else mesh.data.rank
        found[Key(name, model_rank, data_rank)] = fingerprint(own).to(device)
    if not found:
        return {}
    numbers = torch.stack(list(found.values())).tolist()
    return dict(zip(found, numbers, strict=True))


def _ties(model: nn.Module, mine: Mapping[Key, int]) -> dict[str, int]:
    """Return global name -> fingerprint of the weights of this stage that other stages have, too."""
    tied = set(map(id, tied_weights(model)))
    names = {name for name, p in global_parameters(model) if id(p) in tied}
    return {key.name: value for key, value in mine.items() if key.name in names}


def _ties_agree(ties: Mapping[str, int]) -> bool:
    """Return whether all stages have the same fingerprint of each tied weight."""
    found: dict[str, set[int]] = defaultdict(set)
    for stage in gather_objects(ties, mpu.get_mesh().pipe):
        for name, value in stage.items():
            found[name].add(value)
    return all(len(values) == 1 for values in found.values())


def _alike(values: Mapping[Key, int], axis: mpu.Axis, device: torch.device) -> bool:
    """Return whether `values` are the same on all ranks of `axis`, by a hash of 62 bits."""
    if axis.size == 1:
        return True
    text = repr(sorted(values.items(), key=str))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=axis.group)
    most, least = ends.tolist()
    return bool(most == -least)


def _describe_difference(mine: Mapping[Key, int], ties: Mapping[str, int]) -> str:
    """Describe the first weight whose copies differ, and the ranks whose copy differs from the most frequent copy."""
    stage = mpu.get_mesh().pipe.rank
    own = {}
    for key, value in mine.items():
        of_stage = None if key.name in ties else stage
        own[(key, of_stage)] = value
    everywhere = gather_objects(own)
    keys: dict[tuple[Key, int | None], None] = {}
    for each in everywhere:
        keys |= dict.fromkeys(each)
    for held in keys:
        by_rank = {rank: each[held] for rank, each in enumerate(everywhere) if held in each}
        _, first, others = split_usual(by_rank)
        if others:
            return (
                f"the weight {held[0].name} on {name_ranks(others)} differs from its copy on rank "
                f"{first}, although copies must be equal: the hardware is faulty, or a layer "
                "draws other random numbers or skips a reduction on some ranks; nothing was saved or deleted. If the "
                "weight is split over tensor-parallel ranks, call mpu.declare(weight, init, dim=0) where it is made"
            )
    return "copies of weights differed between ranks, but were equal when compared again: the hardware is faulty"

"""Checks that ranks are consistent: settings and versions at startup, copies of weights at every save."""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tds.optimizer_state import complete_weights, local_piece
from tds.pipe import tied_weights

from .. import mpu
from ..config import Config, settings
from ..config.fields import first_of, flag
from ..model.layers import global_parameters
from .errors import RunError, complaint
from .objects import gather_objects
from .source import source_hash, versions

AT_ONCE = 1 << 20  # elements hashed at a time


@contextmanager
def all_ranks() -> Iterator[None]:
    """Raise the same RunError on all ranks if the `with` block fails on any rank, so that no rank hangs.

    All ranks must enter the block; its end is a collective. The block must not contain a collective that a rank
    could miss by failing before it. The RunError has the message of the lowest rank that failed. Only ValueError and
    OSError, the errors that user input causes, are handled. Other exceptions are bugs and propagate on the rank that
    raised them.
    """
    problem = None
    try:
        yield
    except (ValueError, OSError) as error:
        problem = complaint(error)
    for rank, text in enumerate(gather_objects(problem)):
        if text is not None:
            raise RunError(text if rank == 0 else f"rank {rank}: {text}")


def settings_and_versions(config: Config) -> dict[str, str]:
    """Return the settings and versions that must agree between ranks, keyed by their names in error messages."""
    found = {flag(f.name): str(getattr(getattr(config, section), f.name)) for section, _, f in settings()}
    files = {"--deepspeed-config": config.train.deepspeed_config, "--param-groups": config.optim.param_groups}
    for name, path in files.items():
        if path:
            found[f"the SHA-256 of {name} {path}"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    found["the SHA-256 of the source of megatron and tds"] = source_hash()[:12]
    return found | {f"the version of {name}": version for name, version in versions().items()}


def same_everywhere(values: Mapping[str, str] | None) -> None:
    """Raise RunError on all ranks if a value differs between ranks; the message has its name and the values.

    All ranks must call this. The ranks exchange a hash of the values; only if the hashes differ, they exchange the
    values themselves.
    values: values by name; None on a rank that has nothing to compare.
    """
    if dist.get_world_size() == 1:
        return
    digest = None if values is None else hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
    if len({each for each in gather_objects(digest) if each}) <= 1:
        return
    everywhere = {rank: each for rank, each in enumerate(gather_objects(values)) if each is not None}
    differences = []
    for name in dict.fromkeys(name for each in everywhere.values() for name in each):
        here = [each.get(name, "not known") for each in everywhere.values()]
        if len(set(here)) > 1:
            usual, at = _usual_and_others(here)
            ranks = list(everywhere)
            first = ranks[here.index(usual)]
            other = [ranks[i] for i in at]
            differences.append(f"{name} is {usual} on rank {first} and {here[at[0]]} on {_ranks(other)}")
    more = f"; {len(differences) - 3} more differ" if len(differences) > 3 else ""
    raise RunError(f"{'; '.join(differences[:3])}{more}: start all ranks with the same settings and versions")


def _usual_and_others(values: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the most frequent value (the first one on a tie) and the positions of all other values."""
    usual = Counter(values).most_common(1)[0][0]
    return usual, [at for at, value in enumerate(values) if value != usual]


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first_of(ranks)}"


# ------------------------------------------------------------------------------------ weights


def fingerprint(x: Tensor) -> Tensor:
    """Return a hash of the bits of `x`, an int64 scalar on the device of `x`.

    The hash is the sum of all elements of `x`, read as integers, times odd numbers that depend on the element's
    position, modulo 2^64. Flipping any single bit of `x` changes the hash, because an odd number times a power of two
    is never 0 modulo 2^64.
    """
    bits = (
        x.detach()
        .contiguous()
        .view(-1)
        .view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[x.itemsize])
    )
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
    mine = dict(_fingerprints(model, device))
    held = {name for name, p in global_parameters(model) if mpu.replicas_of(p) is not mesh.data}
    whole = _number({k: v for k, v in mine.items() if k[0] not in held})
    copies = _number({k: v for k, v in mine.items() if k[1] is None})
    same = _alike(whole, mesh.data, device) if not any(k[2] is not None for k in mine) else True
    same = _alike(_number({k: v for k, v in mine.items() if k[0] in held}), mesh.expert_replicas, device) and same
    same = _alike(copies, mesh.model, device) and same
    ties = _ties(model)
    stages = gather_objects({name: mine[key] for name, key in ties.items()}, mesh.pipe)
    same = same and all(len({each[n] for each in stages if n in each}) == 1 for each in stages for n in each)
    bad = torch.tensor([float(not same)], device=device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad.item():
        raise RunError(_which(mine, ties))


Key = tuple[
    str, int | None, int | None
]  # (global name, model-parallel rank or None if unsplit, data-parallel rank or None if not sharded by ZeRO 3)


def _fingerprints(model: nn.Module, device: torch.device) -> Iterator[tuple[Key, int]]:
    """Return (key, fingerprint) of every weight of this rank. All fingerprints come to the host in one transfer."""
    mesh = mpu.get_mesh()
    found = {}
    for name, p in global_parameters(model):
        own = local_piece(p)
        key = name, mesh.model.rank if mpu.is_split(p) else None, None if own is p else mesh.data.rank
        found[key] = fingerprint(own).to(device)
    return zip(found, torch.stack(list(found.values())).tolist() if found else [], strict=True)


def _ties(model: nn.Module) -> dict[str, Key]:
    """Return the tied weights of this stage as {global name: key}, with keys as in `_fingerprints`."""
    tied = set(map(id, tied_weights(model)))
    rank = mpu.get_mesh().model.rank
    return {
        name: (name, rank if mpu.is_split(p) else None, None) for name, p in global_parameters(model) if id(p) in tied
    }


def _number(values: Mapping[Any, Any]) -> int:
    """Return a 62-bit hash of `values`."""
    return int.from_bytes(hashlib.sha256(repr(sorted(values.items(), key=str)).encode()).digest()[:8], "big") >> 2


def _alike(number: int, axis: mpu.Axis, device: torch.device) -> bool:
    if axis.size == 1:
        return True
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=axis.group)
    most, least = ends.tolist()
    return bool(most == -least)


def _which(mine: dict[Key, int], ties: dict[str, Key]) -> str:
    """Describe the first weight whose copies differ, and the ranks whose copy differs from the most frequent copy."""
    stage = mpu.get_mesh().pipe.rank
    own: dict[Hashable, int] = {(key if key[0] in ties else (*key, stage)): value for key, value in mine.items()}
    everywhere = gather_objects(own)
    for key in dict.fromkeys(key for each in everywhere for key in each):
        ranks = [rank for rank, each in enumerate(everywhere) if key in each]
        values = [everywhere[rank][key] for rank in ranks]
        if len(set(values)) > 1:
            usual, others = _usual_and_others(values)
            name = key[0]  # type: ignore[index]
            return (
                f"the weight {name} on {_ranks([ranks[at] for at in others])} differs from its copy on rank "
                f"{ranks[values.index(usual)]}, although copies must be equal: the hardware is faulty, or a layer "
                "draws other random numbers or skips a reduction on some ranks; nothing was saved or deleted. If the "
                "weight is split over tensor-parallel ranks, call mpu.declare(weight, init, dim=0) where it is made"
            )
    return "copies of weights differed between ranks, but were equal when compared again: the hardware is faulty"
